# Embeds text files into a C++ source as a map from name to text.
#   fftune_embed_sources(<output.cpp> <function> <base folder> <files relative to it>...)
# The generated file defines `std::map<std::string, std::string> fftune::<function>()`.
set(FFTUNE_EMBED_SCRIPT ${CMAKE_CURRENT_LIST_DIR}/embed.cmake)

function(fftune_embed_sources output function base)
  set(paths ${ARGN})
  list(TRANSFORM paths PREPEND ${base}/)
  string(REPLACE ";" "," names "${ARGN}")
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -DOUTPUT=${output} -DFUNCTION=${function} -DBASE=${base}
            -DNAMES=${names} -P ${FFTUNE_EMBED_SCRIPT}
    DEPENDS ${paths} ${FFTUNE_EMBED_SCRIPT}
    COMMENT "Embedding files as ${function}()"
    VERBATIM)
  # The standard promises 65,536 characters of a string; all supported compilers take more.
  set_source_files_properties(${output} PROPERTIES COMPILE_OPTIONS -Wno-overlength-strings)
endfunction()
