# Run by cmake --install: copies presets to DESTINATION: from a git checkout only
# those that it tracks, as searches write into the same folder; from a release archive all.
cmake_policy(VERSION 3.25)
file(GLOB_RECURSE files RELATIVE ${SOURCE} ${SOURCE}/presets/*.json)
if(EXISTS ${SOURCE}/.git)
  # Who installs need not own the checkout, which git calls dubious.
  execute_process(COMMAND git -c safe.directory=* ls-files presets/*.json
                  WORKING_DIRECTORY ${SOURCE} OUTPUT_VARIABLE listing ERROR_VARIABLE complaint
                  RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "which presets belong to fftune is what git knows: install git, or install "
                        "from a release archive: ${status} ${complaint}")
  endif()
  string(STRIP "${listing}" listing)
  string(REPLACE "\n" ";" tracked "${listing}")
  # A file that was deleted since is still in git's list.
  set(present "")
  foreach(file IN LISTS tracked)
    if(file IN_LIST files)
      list(APPEND present ${file})
    endif()
  endforeach()
  set(files ${present})
endif()
foreach(file IN LISTS files)
  get_filename_component(folder ${file} DIRECTORY)
  string(REGEX REPLACE "^presets/?" "" folder "${folder}")
  file(INSTALL DESTINATION ${DESTINATION}/${folder} TYPE FILE FILES ${SOURCE}/${file})
endforeach()
