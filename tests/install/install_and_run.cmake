# cmake --install, find_package, build, run: what a user of the library does. Any step that fails
# fails the test with its output.
include(${CMAKE_CURRENT_LIST_DIR}/step.cmake)

file(REMOVE_RECURSE ${PREFIX} ${CONSUMER})
step(${CMAKE_COMMAND} --install ${BUILD} --prefix ${PREFIX})

# A sanitized library wants a sanitized program.
if(SANITIZE)
  set(flags "-fsanitize=address,undefined")
endif()
step(${CMAKE_COMMAND} -G ${GENERATOR} -S ${SOURCE} -B ${CONSUMER}
     -DCMAKE_CXX_COMPILER=${COMPILER} "-DCMAKE_CXX_FLAGS=${flags}"
     -DCMAKE_PREFIX_PATH=${PREFIX})
step(${CMAKE_COMMAND} --build ${CONSUMER})
step(${CONSUMER}/consumer)

if(TOOL)
  step(${PREFIX}/bin/fftune --version)
endif()
