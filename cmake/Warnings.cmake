# Warnings, sanitizers and include roots that every target of the project shares.
function(fftune_target_defaults target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wnon-virtual-dtor)
  # GCC sees overlaps and overruns in the standard library's own strings and vectors that are not
  # there (GCC bugs 105651 and 107852); 14 still does.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
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

# Compiles the target's sources by folder, up to 12 as one: they share headers, templates and inline
# functions, which are over a third of a build's time. The names in the unnamed namespaces of a folder
# must differ. Off, an edit compiles one file.
option(FFTUNE_UNITY "Compile the sources of each folder as one" OFF)
function(fftune_unity target)
  if(NOT FFTUNE_UNITY)
    return()
  endif()
  get_target_property(sources ${target} SOURCES)
  foreach(source IN LISTS sources)
    cmake_path(GET source PARENT_PATH folder)
    cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${CMAKE_SOURCE_DIR} OUTPUT_VARIABLE group)
    string(REPLACE "/" "_" group "${group}")
    math(EXPR part "0${size_of_${group}} / 12")
    math(EXPR size_of_${group} "0${size_of_${group}} + 1")
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group}_${part})
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  # One source's local names may be another's constants; and GCC takes the unnamed namespaces of
  # included sources for those of headers.
  target_compile_options(${target} PRIVATE -Wno-shadow)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    target_compile_options(${target} PRIVATE -Wshadow=local -Wno-subobject-linkage)
  endif()
endfunction()
