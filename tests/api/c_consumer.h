/* A C program's use of the API; 0 if all is as it should be, else the step that is not. */
#ifndef FFTUNE_TESTS_API_C_CONSUMER_H
#define FFTUNE_TESTS_API_C_CONSUMER_H

#ifdef __cplusplus
extern "C" {
#endif

int use_fftune_from_c(void);

#ifdef __cplusplus
}
#endif

#endif
