# Presets that git does not track are somebody's own, and are not installed.
cmake_policy(VERSION 3.25)
find_program(git git)
if(NOT git)
  message(STATUS "skipped: there is no git")
  return()
endif()

function(install_from source)
  execute_process(COMMAND ${CMAKE_COMMAND} -DSOURCE=${source} -DDESTINATION=${FOLDER}/installed
                          -P ${SCRIPT}
                  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${output}")
  endif()
endfunction()

function(expect_installed)
  file(GLOB_RECURSE files RELATIVE ${FOLDER}/installed ${FOLDER}/installed/*)
  list(SORT files)
  if(NOT "${files}" STREQUAL "${ARGN}")
    message(FATAL_ERROR "installed: ${files}; expected: ${ARGN}")
  endif()
  file(REMOVE_RECURSE ${FOLDER}/installed)
endfunction()

file(REMOVE_RECURSE ${FOLDER})
foreach(file schema.json one/ffn.json one/deleted.json two/ffn.json)
  file(WRITE ${FOLDER}/source/presets/${file} "{}\n")
endforeach()
install_from(${FOLDER}/source)  # a release archive
expect_installed(one/deleted.json one/ffn.json schema.json two/ffn.json)

execute_process(COMMAND git init --quiet WORKING_DIRECTORY ${FOLDER}/source
                COMMAND_ERROR_IS_FATAL ANY)
execute_process(COMMAND git add presets/schema.json presets/one
                WORKING_DIRECTORY ${FOLDER}/source COMMAND_ERROR_IS_FATAL ANY)
file(REMOVE ${FOLDER}/source/presets/one/deleted.json)
install_from(${FOLDER}/source)
expect_installed(one/ffn.json schema.json)
