/* fftune.h from C99: compiled with -std=c99 -pedantic -Werror. */
#include "c_consumer.h"

#include <fftune/fftune.h>
#include <string.h>

int use_fftune_from_c(void) {
  fftune_context* context = NULL;
  fftune_plan* plan = NULL;
  fftune_status status;
  if (strlen(fftune_version()) == 0) return 1;
  status = fftune_context_create(-1, NULL, &context);
  if (status != FFTUNE_OK || context == NULL) return 2;
  status = fftune_plan_create(context, "{\"op\":\"no such op\"}", &plan);
  if (status != FFTUNE_INVALID_INPUT || plan != NULL) return 3;
  if (strstr(fftune_last_error(), "no such op") == NULL) return 4;
  if (fftune_plan_run(plan, NULL, 0, NULL, NULL) != FFTUNE_INVALID_INPUT) return 5;
  fftune_plan_destroy(plan);
  fftune_context_destroy(context);
  return 0;
}
