// PTX as a list of instructions per kernel: parsed, with nothing known about what they mean.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace fftune::emulator {

/// An operand as written: a name or a number; {a, b}; [a+8] or [map, {x, y}]; d|p; !p.
struct Operand {
  enum class Kind { atom, vector, address, pair } kind = Kind::atom;
  std::string text;               // of an atom
  bool negated = false;           // of an atom
  std::vector<Operand> elements;  // of a vector or pair; an address' base and what follows it
  std::int64_t offset = 0;        // of an address
};

struct Statement {
  std::string_view text;
  std::string guard;  // a predicate's name, or empty
  bool guard_negated = false;
  std::vector<std::string> opcode;  // at its dots: "ld", "global", "v4", "f32"
  std::vector<Operand> operands;
  std::size_t scope = 0;  // of its names

  bool has(std::string_view modifier) const;
};

struct Variable {
  std::string space;  // "shared", "global", "const", "local"
  std::size_t alignment = 1, bytes = 0;
  std::vector<std::uint8_t> initial;  // empty: zeros
};

struct Parameter {
  std::size_t offset = 0, bytes = 0;
};

struct Scope {
  std::size_t parent = 0;
  std::map<std::string, std::size_t> register_bytes;  // of a predicate 0
  std::map<std::string, std::size_t> labels;          // index of the statement that follows
};

struct KernelText {
  std::string name;
  std::vector<Parameter> parameters;
  std::map<std::string, std::size_t> parameter_index;
  std::size_t parameter_bytes = 0;
  std::map<std::string, Variable> variables;  // in shared and local memory
  std::vector<Scope> scopes;
  std::vector<Statement> statements;
  std::size_t most_threads = 1024;  // .maxntid

  /// Bytes of a register that the scope sees, or nullptr.
  const std::size_t* find_register(std::size_t scope, const std::string& register_name,
                                   std::size_t* owner) const;
  /// Index of a label's statement. Throws std::runtime_error where there is none.
  std::size_t find_label(std::size_t scope, const std::string& label) const;
};

struct ModuleText {
  std::string text;  // what the statements' texts are parts of
  std::map<std::string, Variable> variables;
  std::map<std::string, KernelText> kernels;
};

/// The bits of "12", "-1", "0x1f", "0f3F800000"; nothing if it is no number.
std::optional<std::uint64_t> literal(std::string_view text);

/// Bytes of an element of "f32", "bf16x2", "pred" (0).
std::size_t type_bytes(std::string_view type);

/// Throws std::runtime_error, which quotes the text that it does not know.
ModuleText parse_ptx(std::string text);

}  // namespace fftune::emulator
