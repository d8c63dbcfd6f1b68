# make install: the headers, both libraries, the command line and the CMake package.
include(CMakePackageConfigHelpers)

install(DIRECTORY include/tilewave DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(TARGETS tilewave tilewave_shared EXPORT TilewaveTargets)
if(TARGET tilewave_speech)
  install(TARGETS tilewave_speech tilewave_speech_shared EXPORT TilewaveTargets)
endif()
if(TILEWAVE_APPS)
  install(TARGETS tilewave_cli)
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/tilewave)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Tilewave)
install(EXPORT TilewaveTargets NAMESPACE Tilewave:: DESTINATION ${package_dir})
configure_package_config_file(cmake/TilewaveConfig.cmake.in ${PROJECT_BINARY_DIR}/TilewaveConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TilewaveConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TilewaveConfig.cmake ${PROJECT_BINARY_DIR}/TilewaveConfigVersion.cmake cmake/tilewave_embed.cmake
        DESTINATION ${package_dir})
