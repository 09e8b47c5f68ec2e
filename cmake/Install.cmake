# cmake --install: the library, its headers, what find_package and pkg-config read, and the presets.
# The tool is installed where it is defined. Components are the packages of Package.cmake.
include(CMakePackageConfigHelpers)

# A relative folder is below the prefix of the time of installation.
set(preset_destination ${FFTUNE_PRESET_DIR})
if(NOT IS_ABSOLUTE ${FFTUNE_PRESET_DIR})
  set(preset_destination "\${CMAKE_INSTALL_PREFIX}/${FFTUNE_PRESET_DIR}")
endif()
string(CONCAT install_presets
       "set(SOURCE \"${PROJECT_SOURCE_DIR}\")\n"
       "set(DESTINATION \"${preset_destination}\")\n"
       "include(\"${CMAKE_CURRENT_LIST_DIR}/InstallPresets.cmake\")")
install(CODE "${install_presets}" COMPONENT library)

install(DIRECTORY ${PROJECT_SOURCE_DIR}/lib/include/fftune DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}
        COMPONENT development)

# A wheel has no symbolic links: the library is one file there, of the name that programs linked to it
# look for.
if(SKBUILD)
  install(FILES $<TARGET_FILE:fftune> DESTINATION ${CMAKE_INSTALL_LIBDIR}
          RENAME $<TARGET_SONAME_FILE_NAME:fftune>)
  return()
endif()

install(TARGETS fftune EXPORT fftuneTargets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
                COMPONENT library NAMELINK_COMPONENT development)

# Libraries that a program needs beside libfftune.a.
set(static_libraries stdc++ m dl pthread)
if(NOT FFTUNE_PACKAGING)
  list(PREPEND static_libraries fmt)
endif()

set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/fftune)
install(EXPORT fftuneTargets NAMESPACE fftune:: DESTINATION ${package_folder} COMPONENT development)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/fftuneConfig.cmake.in
                              ${PROJECT_BINARY_DIR}/fftuneConfig.cmake
                              INSTALL_DESTINATION ${package_folder}
                              PATH_VARS CMAKE_INSTALL_LIBDIR CMAKE_INSTALL_INCLUDEDIR)
# Before 1.0 a minor version may change the API.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fftuneConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fftuneConfig.cmake
              ${PROJECT_BINARY_DIR}/fftuneConfigVersion.cmake
        DESTINATION ${package_folder} COMPONENT development)

# The prefix relative to the file's own folder, so that an installed tree may be moved.
file(RELATIVE_PATH pkgconfig_to_prefix /prefix/${CMAKE_INSTALL_LIBDIR}/pkgconfig /prefix)
string(REGEX REPLACE "/$" "" pkgconfig_to_prefix ${pkgconfig_to_prefix})
list(TRANSFORM static_libraries PREPEND -l OUTPUT_VARIABLE static_flags)
string(REPLACE ";" " " static_flags "${static_flags}")
configure_file(${CMAKE_CURRENT_LIST_DIR}/fftune.pc.in ${PROJECT_BINARY_DIR}/fftune.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/fftune.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig
        COMPONENT development)

if(FFTUNE_STATIC)
  install(FILES $<TARGET_PROPERTY:fftune_static,FFTUNE_ARCHIVE>
          DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT development)
endif()
