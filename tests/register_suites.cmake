# Included by ctest when it starts, once for each test program, with its path in `program` and its name in `group`: registers every suite of it as one
# entry. One process for each TEST would cost more than most tests, above all under the sanitizers. Two kinds of tests in a suite have entries of their
# own: those with "cuda" in their names, which need a GPU and have the label gpu, and those with "WithoutSpills" in their names, which compile many kernels
# and have the label kernels. Tests whose names contain one of the strings in `left_out` are not run.
if(NOT EXISTS "${program}")
  add_test("${group}.not_built" "${program}")
  set_tests_properties("${group}.not_built" PROPERTIES LABELS "${group}")
  return()
endif()
execute_process(COMMAND "${program}" --gtest_list_tests OUTPUT_VARIABLE lines COMMAND_ERROR_IS_FATAL ANY)
string(REGEX REPLACE " +#[^\n]*" "" lines "${lines}")  # values of parameters
string(REPLACE "\n" ";" lines "${lines}")

string(JOIN "|" not_on_cpu cuda ${left_out})
set(filter_of_cpu "-*cuda*:*WithoutSpills*")
foreach(part IN LISTS left_out)
  string(APPEND filter_of_cpu ":*${part}*")
endforeach()

set(suites "")
foreach(line IN LISTS lines)
  if(line MATCHES "^([^ ]+)[.]$")
    set(suite "${CMAKE_MATCH_1}")
    list(APPEND suites "${suite}")
    set("on_cpu_${suite}" 0)
    set("on_gpu_${suite}" 0)
    set("kernels_of_${suite}" FALSE)
  elseif(line MATCHES "^  " AND "${suite}.${line}" MATCHES "cuda")
    math(EXPR "on_gpu_${suite}" "${on_gpu_${suite}} + 1")
  elseif(line MATCHES "^  .*WithoutSpills")
    set("kernels_of_${suite}" TRUE)
  elseif(line MATCHES "^  " AND NOT "${suite}.${line}" MATCHES "${not_on_cpu}")
    math(EXPR "on_cpu_${suite}" "${on_cpu_${suite}} + 1")
  endif()
endforeach()

foreach(suite IN LISTS suites)
  set(name "${group}.${suite}")
  if(on_cpu_${suite} GREATER 0)
    add_test("${name}" "${program}" "--gtest_filter=${suite}.*${filter_of_cpu}")
    # Those with the most tests first, so that none is left running alone at the end.
    set_tests_properties("${name}" PROPERTIES LABELS "${group}" TIMEOUT 900 COST "${on_cpu_${suite}}")
  endif()
  if(kernels_of_${suite})
    add_test("${name}.kernels" "${program}" "--gtest_filter=${suite}.*WithoutSpills*:-*cuda*")
    # It compiles on all cores.
    set_tests_properties("${name}.kernels" PROPERTIES LABELS "kernels;${group}" TIMEOUT 1800 PROCESSORS 2)
  endif()
  if(on_gpu_${suite} GREATER 0)
    set(filter "${suite}.*")
    if(on_cpu_${suite} GREATER 0)
      string(APPEND filter "cuda*")
    endif()
    add_test("${name}.cuda" "${program}" "--gtest_filter=${filter}")
    # One at a time: they share the GPU and its memory.
    set_tests_properties("${name}.cuda" PROPERTIES LABELS "gpu;${group}" TIMEOUT 1800 RUN_SERIAL TRUE)
  endif()
endforeach()
