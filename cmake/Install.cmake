# cmake --install: the library, its headers, what find_package reads, and the presets. The tool is
# installed where it is defined.
include(CMakePackageConfigHelpers)

# A wheel has no symbolic links: the library is one file there, and Python packages are what finds it.
if(SKBUILD)
  install(FILES $<TARGET_FILE:fftune> DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME libfftune.so)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/lib/include/fftune DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/presets/ DESTINATION ${FFTUNE_PRESET_DIR} OPTIONAL)
  return()
endif()

install(TARGETS fftune EXPORT fftuneTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
        RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/lib/include/fftune DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/presets/ DESTINATION ${FFTUNE_PRESET_DIR}
        OPTIONAL)

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/fftune)
install(EXPORT fftuneTargets NAMESPACE fftune:: DESTINATION ${package_folder})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/fftuneConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/fftuneConfig.cmake
                              INSTALL_DESTINATION ${package_folder})
# Before 1.0 a minor version may change the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fftuneConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fftuneConfig.cmake
              ${PROJECT_BINARY_DIR}/fftuneConfigVersion.cmake
        DESTINATION ${package_folder})
