# What a Python wheel holds beside python/tilewave: the libraries, the command line and the bundled checkpoint, and the registered kernels where both look for
# them.
foreach(library tilewave_shared tilewave_speech_shared)
  set_property(TARGET ${library} PROPERTY INSTALL_RPATH $ORIGIN)
  set_property(TARGET ${library} PROPERTY VERSION)  # a wheel holds no links: one file of one name
  set_property(TARGET ${library} PROPERTY SOVERSION)
  install(TARGETS ${library} LIBRARY DESTINATION tilewave/lib COMPONENT wheel)
endforeach()

if(TARGET tilewave_av)
  install(TARGETS tilewave_av LIBRARY DESTINATION tilewave/lib COMPONENT wheel)
endif()
install(TARGETS tilewave_cli RUNTIME DESTINATION tilewave/bin COMPONENT wheel)
install(DIRECTORY assets/digits DESTINATION tilewave/share/tilewave/models COMPONENT wheel)

# The kernels take a minute or two, and NVRTC: that of a CUDA toolkit, or the wheel that pip installs to build this one.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
execute_process(COMMAND ${Python3_EXECUTABLE} -c "import nvidia, pathlib; print(pathlib.Path(list(nvidia.__path__)[0]).parents[3])"
                OUTPUT_VARIABLE nvrtc_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
set(pack ${PROJECT_BINARY_DIR}/pack)
add_custom_command(
  OUTPUT ${pack}.stamp
  COMMAND ${CMAKE_COMMAND} -E env VIRTUAL_ENV=${nvrtc_root} $<TARGET_FILE:tilewave_cli> kernels compile --arch sm_90a --output ${pack} > ${pack}.log
  COMMAND ${CMAKE_COMMAND} -E touch ${pack}.stamp
  DEPENDS tilewave_cli VERBATIM)
add_custom_target(tilewave_pack DEPENDS ${pack}.stamp)
install(DIRECTORY ${pack}/ DESTINATION tilewave/share/tilewave/kernels COMPONENT wheel)
