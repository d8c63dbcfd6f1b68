# make install: the headers, both libraries, the command line and the CMake package.
include(CMakePackageConfigHelpers)

# Programs and libraries find what lies in the library folder beside them: in a bundle also what a system may not have (scripts/bundle.sh). As DT_RPATH, since
# DT_RUNPATH would not hold for what those need in turn.
if(TARGET tilewave_speech)
  set_target_properties(tilewave_speech_shared PROPERTIES INSTALL_RPATH $ORIGIN)
  target_link_options(tilewave_speech_shared PRIVATE LINKER:--disable-new-dtags)
endif()
if(TILEWAVE_APPS)
  set_target_properties(tilewave_cli PROPERTIES INSTALL_RPATH $ORIGIN/../${CMAKE_INSTALL_LIBDIR})
  target_link_options(tilewave_cli PRIVATE LINKER:--disable-new-dtags)
endif()

# What a user needs, without the tests: a build takes half as long.
add_custom_target(product)

install(DIRECTORY include/tilewave DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.hpp" PATTERN "*.h")
install(TARGETS tilewave tilewave_shared EXPORT TilewaveTargets)
add_dependencies(product tilewave tilewave_shared)
if(TARGET tilewave_speech)
  install(TARGETS tilewave_speech tilewave_speech_shared EXPORT TilewaveTargets)
  add_dependencies(product tilewave_speech tilewave_speech_shared)
  if(TARGET tilewave_av)
    install(TARGETS tilewave_av LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
    add_dependencies(product tilewave_av)
  endif()
  install(DIRECTORY assets/digits DESTINATION ${CMAKE_INSTALL_DATADIR}/tilewave/models)
endif()
if(TILEWAVE_APPS)
  install(TARGETS tilewave_cli)
  add_dependencies(product tilewave_cli)
  install(DIRECTORY assets/samples DESTINATION ${CMAKE_INSTALL_DATADIR}/tilewave)  # the server's page offers them
endif()
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DATADIR}/doc/tilewave)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/Tilewave)
install(EXPORT TilewaveTargets NAMESPACE Tilewave:: DESTINATION ${package_dir})
configure_package_config_file(cmake/TilewaveConfig.cmake.in ${PROJECT_BINARY_DIR}/TilewaveConfig.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/TilewaveConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/TilewaveConfig.cmake ${PROJECT_BINARY_DIR}/TilewaveConfigVersion.cmake cmake/tilewave_embed.cmake
        DESTINATION ${package_dir})
