#include "emulator/ptx.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <stdexcept>

namespace fftune::emulator {
namespace {

[[noreturn]] void refuse(std::string_view what, std::string_view text) {
  throw std::runtime_error("PTX: " + std::string(what) + ": " + std::string(text));
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.front())))
    text.remove_prefix(1);
  while (!text.empty() && std::isspace(static_cast<unsigned char>(text.back())))
    text.remove_suffix(1);
  return text;
}

/// At the commas that are in no bracket.
std::vector<std::string_view> split(std::string_view text) {
  std::vector<std::string_view> parts;
  int depth = 0;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= text.size(); ++i) {
    if (i == text.size() || (text[i] == ',' && depth == 0)) {
      if (const auto part = trimmed(text.substr(begin, i - begin)); !part.empty())
        parts.push_back(part);
      begin = i + 1;
    } else if (text[i] == '{' || text[i] == '[' || text[i] == '(') {
      ++depth;
    } else if (text[i] == '}' || text[i] == ']' || text[i] == ')') {
      --depth;
    }
  }
  return parts;
}

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  std::string word;
  for (const char c : text) {
    const bool apart = std::string_view(",()=[]").find(c) != std::string_view::npos;
    if (!apart && !std::isspace(static_cast<unsigned char>(c))) {
      word += c;
      continue;
    }
    if (!word.empty()) words.push_back(std::move(word));
    word.clear();
    if (apart) words.emplace_back(1, c);
  }
  if (!word.empty()) words.push_back(std::move(word));
  return words;
}

std::int64_t number_of(std::string_view text) {
  const auto value = literal(text);
  if (!value) refuse("a number", text);
  return static_cast<std::int64_t>(*value);
}

Operand operand_of(std::string_view text) {
  text = trimmed(text);
  Operand operand;
  if (text.front() == '{' || text.front() == '[') {
    operand.kind = text.front() == '{' ? Operand::Kind::vector : Operand::Kind::address;
    auto parts = split(text.substr(1, text.size() - 2));
    if (operand.kind == Operand::Kind::address) {
      if (const auto plus = parts.at(0).find('+'); plus != std::string_view::npos) {
        operand.offset = number_of(trimmed(parts[0].substr(plus + 1)));
        parts[0] = trimmed(parts[0].substr(0, plus));
      }
    }
    for (const auto part : parts) operand.elements.push_back(operand_of(part));
  } else if (const auto bar = text.find('|'); bar != std::string_view::npos) {
    operand.kind = Operand::Kind::pair;
    operand.elements = {operand_of(text.substr(0, bar)), operand_of(text.substr(bar + 1))};
  } else {
    operand.negated = text.front() == '!';
    operand.text = text.substr(operand.negated ? 1 : 0);
  }
  return operand;
}

Statement statement_of(std::string_view text, std::size_t scope) {
  Statement statement;
  statement.text = text;
  statement.scope = scope;
  if (text.front() == '@') {
    const auto end = text.find_first_of(" \t\n");
    statement.guard_negated = text[1] == '!';
    const std::size_t begin = statement.guard_negated ? 2 : 1;
    statement.guard = text.substr(begin, end - begin);
    text = trimmed(text.substr(end));
  }
  const auto end = std::min(text.find_first_of(" \t\n{"), text.size());
  for (std::string_view opcode = text.substr(0, end); !opcode.empty();) {
    const auto dot = std::min(opcode.find('.'), opcode.size());
    statement.opcode.emplace_back(opcode.substr(0, dot));
    opcode.remove_prefix(std::min(dot + 1, opcode.size()));
  }
  for (const auto part : split(text.substr(end))) statement.operands.push_back(operand_of(part));
  return statement;
}

/// ".shared .align 4 .b8 name[24] = {1, 2}": its name and the variable.
std::pair<std::string, Variable> variable_of(std::string_view text) {
  Variable variable;
  std::string name;
  std::size_t element = 0, count = 1;
  const auto equals = std::min(text.find('='), text.size());
  const auto words = words_of(text.substr(0, equals));
  for (std::size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == ".align") {
      variable.alignment = static_cast<std::size_t>(number_of(words.at(++i)));
    } else if (word == "[") {
      count = words.at(i + 1) == "]" ? 0 : static_cast<std::size_t>(number_of(words.at(i + 1)));
      break;
    } else if (word == ".shared" || word == ".global" || word == ".const" || word == ".local") {
      variable.space = word.substr(1);
    } else if (word[0] != '.') {
      name = word;
    } else if (word != ".extern" && word != ".visible" && word != ".weak" && word != ".common" &&
               word != ".attribute" && word != ".param") {
      element = type_bytes(word.substr(1));
    }
  }
  variable.alignment = std::max(variable.alignment, element);
  variable.bytes = element * count;
  if (equals < text.size()) {
    auto values = trimmed(text.substr(equals + 1));
    if (values.front() == '{') values = values.substr(1, values.size() - 2);
    for (const auto part : split(values)) {
      const auto value = static_cast<std::uint64_t>(number_of(part));
      for (std::size_t byte = 0; byte < element; ++byte)
        variable.initial.push_back(static_cast<std::uint8_t>(value >> 8 * byte));
    }
    variable.initial.resize(variable.bytes);
  }
  return {name, variable};
}

class Parser {
 public:
  explicit Parser(ModuleText& module) : module_(module), text_(module.text) {}

  void run() {
    while (skip_blanks(), at_ < text_.size()) step();
  }

 private:
  void skip_blanks() {
    while (at_ < text_.size()) {
      if (std::isspace(static_cast<unsigned char>(text_[at_])))
        ++at_;
      else if (text_.substr(at_, 2) == "//")
        at_ = std::min(text_.find('\n', at_), text_.size());
      else
        break;
    }
  }

  void step() {
    const char first = text_[at_];
    if (first == '{' || first == '}') {
      ++at_;
      first == '{' ? open() : close();
      return;
    }
    // Directives that end with their line.
    for (const std::string_view word :
         {".version ", ".target ", ".address_size ", ".file ", ".file\t", ".loc ", ".loc\t"})
      if (text_.substr(at_, word.size()) == word) {
        at_ = std::min(text_.find('\n', at_), text_.size());
        return;
      }
    if (text_.substr(at_, 8) == ".section") {  // of debug information
      at_ = std::min(text_.find('}', at_), text_.size() - 1) + 1;
      return;
    }
    const std::size_t begin = at_;
    const bool is_directive = first == '.';
    for (int depth = 0; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      const auto text = trimmed(text_.substr(begin, at_ - begin));
      if (c == '{' && is_directive && text.find(".entry") != std::string_view::npos)
        return ++at_, header(text);
      if (c == '{') ++depth;
      if (c == '}') --depth;
      if (depth > 0) continue;
      if (c == ':' && !is_directive) {
        if (text_[at_ + 1] == ':') {
          ++at_;
          continue;
        }
        ++at_;
        kernel().scopes[scope_].labels[std::string(text)] = kernel().statements.size();
        return;
      }
      if (c == ';') {
        ++at_;
        is_directive ? directive(text) : kernel().statements.push_back(statement_of(text, scope_));
        return;
      }
    }
    refuse("a statement without an end", text_.substr(begin, 80));
  }

  KernelText& kernel() {
    if (kernel_ == nullptr) refuse("an instruction outside of a kernel", text_.substr(at_, 80));
    return *kernel_;
  }

  void open() {
    kernel().scopes.push_back({scope_, {}, {}});
    scope_ = kernel_->scopes.size() - 1;
  }

  void close() {
    if (scope_ == 0)
      kernel_ = nullptr;
    else
      scope_ = kernel().scopes[scope_].parent;
  }

  void header(std::string_view text) {
    const auto open = text.find('(');
    const auto close = text.rfind(')');
    const std::string name(trimmed(text.substr(
        text.find(".entry") + 6, std::min(open, text.size()) - text.find(".entry") - 6)));
    kernel_ = &module_.kernels[name];
    kernel_->name = name;
    kernel_->scopes.emplace_back();
    scope_ = 0;
    std::string_view rest = text.substr(text.find(name) + name.size());
    if (open != std::string_view::npos) {
      for (const auto part : split(text.substr(open + 1, close - open - 1))) {
        const auto [parameter, variable] = variable_of(part);
        const std::size_t offset = (kernel_->parameter_bytes + variable.alignment - 1) /
                                   variable.alignment * variable.alignment;
        kernel_->parameter_index[parameter] = kernel_->parameters.size();
        kernel_->parameters.push_back({offset, variable.bytes});
        kernel_->parameter_bytes = offset + variable.bytes;
      }
      rest = text.substr(close + 1);
    }
    const auto words = words_of(rest);
    for (std::size_t i = 0; i < words.size(); ++i)
      if (words[i] == ".maxntid" || words[i] == ".reqntid") {
        kernel_->most_threads = 1;
        for (++i; i < words.size() && words[i][0] != '.'; ++i)
          if (words[i] != ",")
            kernel_->most_threads *= static_cast<std::size_t>(number_of(words[i]));
        --i;
      }
  }

  void directive(std::string_view text) {
    if (text.starts_with(".pragma")) return;
    if (text.starts_with(".reg")) return registers(text);
    auto [name, variable] = variable_of(text);
    if (variable.space.empty()) refuse("an unknown directive", text);
    (kernel_ != nullptr ? kernel_->variables : module_.variables)[name] = std::move(variable);
  }

  void registers(std::string_view text) {
    const auto words = words_of(text);
    const std::size_t bytes = type_bytes(words.at(1).substr(1));
    auto& own = kernel().scopes[scope_].register_bytes;
    for (std::size_t i = 2; i < words.size(); ++i) {
      if (words[i] == ",") continue;
      const auto range = words[i].find('<');
      if (range == std::string::npos) {
        own[words[i]] = bytes;
        continue;
      }
      const auto count =
          number_of(std::string_view(words[i]).substr(range + 1, words[i].size() - range - 2));
      for (std::int64_t j = 0; j < count; ++j)
        own[words[i].substr(0, range) + std::to_string(j)] = bytes;
    }
  }

  ModuleText& module_;
  std::string_view text_;
  std::size_t at_ = 0;
  KernelText* kernel_ = nullptr;
  std::size_t scope_ = 0;
};

}  // namespace

bool Statement::has(std::string_view modifier) const {
  return std::find(opcode.begin() + 1, opcode.end(), modifier) != opcode.end();
}

const std::size_t* KernelText::find_register(std::size_t scope, const std::string& register_name,
                                             std::size_t* owner) const {
  for (;; scope = scopes[scope].parent) {
    const auto found = scopes[scope].register_bytes.find(register_name);
    *owner = scope;
    if (found != scopes[scope].register_bytes.end()) return &found->second;
    if (scope == 0) return nullptr;
  }
}

std::size_t KernelText::find_label(std::size_t scope, const std::string& label) const {
  for (;; scope = scopes[scope].parent) {
    const auto found = scopes[scope].labels.find(label);
    if (found != scopes[scope].labels.end()) return found->second;
    if (scope == 0) refuse("an unknown label", label);
  }
}

std::optional<std::uint64_t> literal(std::string_view text) {
  std::uint64_t value = 0;
  bool negative = false;
  int base = 10;
  const std::string_view whole = text;
  if (text.starts_with("0f") || text.starts_with("0F") || text.starts_with("0d") ||
      text.starts_with("0D") || text.starts_with("0x") || text.starts_with("0X")) {
    base = 16;
    text.remove_prefix(2);
  } else if (text.starts_with("-")) {
    negative = true;
    text.remove_prefix(1);
  }
  if (whole.ends_with("U")) text.remove_suffix(1);
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value, base);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return {};
  return negative ? ~value + 1 : value;
}

std::size_t type_bytes(std::string_view type) {
  if (type == "pred") return 0;
  if (type == "e4m3x2" || type == "e5m2x2") return 2;
  if (type == "f16x2" || type == "bf16x2" || type == "tf32") return 4;
  for (const std::size_t bits : {128, 64, 32, 16, 8}) {
    const std::string digits = std::to_string(bits);
    if (type.ends_with(digits) && type.size() <= digits.size() + 2) return bits / 8;
  }
  refuse("an unknown type", type);
}

ModuleText parse_ptx(std::string text) {
  ModuleText module;
  std::replace(text.begin(), text.end(), '\0', '\n');
  module.text = std::move(text);
  Parser(module).run();
  return module;
}

}  // namespace fftune::emulator
