# Warnings, sanitizers and include roots that every target of the project shares.
function(fftune_target_defaults target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor)
  # GCC 12 and 13 see overlaps and overruns in the standard library's own strings and vectors that
  # are not there (GCC bugs 105651 and 107852).
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 14)
    target_compile_options(${target} PRIVATE -Wno-restrict -Wno-array-bounds
                           -Wno-stringop-overflow -Wno-stringop-overread)
  endif()
  if(FFTUNE_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(FFTUNE_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=address,undefined -fno-omit-frame-pointer
                                             -fno-sanitize-recover=undefined)
    target_link_options(${target} PRIVATE -fsanitize=address,undefined)
  endif()
endfunction()

# Compiles the headers that most files include once for the whole target: half of a build's time.
# Off, a file that forgets an include is found out.
option(FFTUNE_PRECOMPILE "Precompile common headers" ON)
# A source with options of its own, such as -mavx2, quietly reads the headers themselves.
set(CMAKE_PCH_WARN_INVALID OFF)
# The headers behind the target are those that most of its files include besides.
function(fftune_precompile target)
  if(FFTUNE_PRECOMPILE)
    target_precompile_headers(
      ${target} PRIVATE <algorithm> <cstdint> <functional> <map> <memory> <optional> <string>
      <string_view> <utility> <variant> <vector> <fmt/format.h> ${ARGN})
  endif()
endfunction()
