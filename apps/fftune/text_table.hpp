// A table of aligned columns for people.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/terminal.hpp"

namespace fftune::tool {

enum class Align { left, right };

struct Column {
  std::string title;
  Align align = Align::left;
};

struct Cell {
  Cell(std::string cell_text, Style cell_style = Style::plain)
      : text(std::move(cell_text)), style(cell_style) {}
  Cell(const char* cell_text) : text(cell_text) {}

  std::string text;
  Style style = Style::plain;
};

class TextTable {
 public:
  explicit TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// Missing cells at the end are empty. Throws Error(internal) if there are too many.
  void row(std::vector<Cell> cells);
  bool empty() const { return rows_.empty(); }

  /// Header and rows, two spaces between columns, none at the end of a line, each line ended.
  std::string text(bool color) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace fftune::tool
