// A table of aligned columns for people.
#pragma once

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "apps/fftune/terminal/text.hpp"
#include "measure/statistics.hpp"

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

/// ratio_text(), in another colour below 1; "-" for one that is not known, 0.
Cell ratio_cell(double ratio);

/// The same of a measured ratio; its interval where it is not known to `known_to`, such as
/// 10%: 1.1.
Cell ratio_cell(const Ratio& ratio, double known_to);

class TextTable {
 public:
  explicit TextTable(std::vector<Column> columns) : columns_(std::move(columns)) {}

  /// Missing cells at the end are empty. Throws Error(internal) if there are too many.
  void row(std::vector<Cell> cells);
  bool empty() const { return rows_.empty(); }

  /// Header and rows, two spaces between columns, none at the end of a line, each line ended. Texts
  /// wider than `width` are broken between words: at spaces, and after ',', '/', '+', ';' and '-'
  /// so that ids of variants break too. Where that is not enough, the longest texts go below their
  /// row, each on lines of its own.
  std::string text(bool color, std::size_t width = std::numeric_limits<std::size_t>::max()) const;

 private:
  std::vector<Column> columns_;
  std::vector<std::vector<Cell>> rows_;
};

}  // namespace fftune::tool
