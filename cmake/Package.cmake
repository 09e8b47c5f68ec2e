# cpack -G DEB: the Debian packages fftune (the tool), libfftune0.1 (the library with its presets) and
# libfftune-dev. The library's name follows its SONAME, so that programs which need different ones
# live on one machine.
if(SKBUILD)
  return()
endif()

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME fftune)
set(CPACK_PACKAGE_CONTACT "The fftune authors")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "${PROJECT_DESCRIPTION}")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_ALL tool library development)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)

set(library libfftune${FFTUNE_API_VERSION})
set(same_version "= ${PROJECT_VERSION}")

set(CPACK_DEBIAN_TOOL_PACKAGE_NAME fftune)
set(CPACK_COMPONENT_TOOL_DESCRIPTION "This is the tool: it searches, checks, measures and records.")
set(CPACK_DEBIAN_TOOL_PACKAGE_DEPENDS "${library} (${same_version})")
# Opened at run time, where a plan needs it.
set(CPACK_DEBIAN_TOOL_PACKAGE_RECOMMENDS libopenblas0)

set(CPACK_DEBIAN_LIBRARY_PACKAGE_NAME ${library})
set(CPACK_DEBIAN_LIBRARY_PACKAGE_SECTION libs)
set(CPACK_COMPONENT_LIBRARY_DESCRIPTION "This is the library, with its presets: it runs the kernels that they name, on GPUs (through the
driver and NVRTC, which it opens at run time) and on the CPU.")
set(CPACK_DEBIAN_LIBRARY_PACKAGE_RECOMMENDS libopenblas0)
# The library registers itself with the loader.
file(WRITE ${PROJECT_BINARY_DIR}/packaging/triggers "activate-noawait ldconfig\n")
file(WRITE ${PROJECT_BINARY_DIR}/packaging/shlibs
     "libfftune ${FFTUNE_API_VERSION} ${library} (>= ${PROJECT_VERSION})\n")
set(CPACK_DEBIAN_LIBRARY_PACKAGE_CONTROL_EXTRA
    "${PROJECT_BINARY_DIR}/packaging/triggers;${PROJECT_BINARY_DIR}/packaging/shlibs")

set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME libfftune-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION "These are the C and C++ headers of the library, and what CMake and pkg-config read.")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "${library} (${same_version})")
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SHLIBDEPS OFF)

# Every package says what may be done with it, and what changed.
foreach(pair tool=fftune library=${library} development=libfftune-dev)
  string(REPLACE "=" ";" pair ${pair})
  list(GET pair 0 component)
  list(GET pair 1 package)
  set(documents ${CMAKE_INSTALL_DATAROOTDIR}/doc/${package})
  install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${documents} RENAME copyright
          COMPONENT ${component})
  install(FILES ${PROJECT_SOURCE_DIR}/CHANGELOG.md DESTINATION ${documents} COMPONENT ${component})
endforeach()

include(CPack)
