#include "apps/fftune/text_table.hpp"

#include <algorithm>

#include "core/error.hpp"

namespace fftune::tool {

namespace {

std::string line_of(const std::vector<Cell>& cells, const std::vector<Column>& columns,
                    const std::vector<std::size_t>& widths, bool color) {
  std::string line;
  std::size_t owed = 0;  // spaces due before the next text: none are left at a line's end
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const std::size_t width = display_width(cells[i].text);
    const std::size_t padding = widths[i] - width;
    if (columns[i].align == Align::right) owed += padding;
    if (width > 0) {
      line.append(owed, ' ').append(styled(cells[i].text, cells[i].style, color));
      owed = 0;
    }
    owed += columns[i].align == Align::left ? padding : 0;
    owed += 2;
  }
  return line.append("\n");
}

}  // namespace

void TextTable::row(std::vector<Cell> cells) {
  if (cells.size() > columns_.size())
    throw Error(ErrorKind::internal, "a table row has more cells than the table has columns");
  for (Cell& cell : cells) cell.text = shown(cell.text);
  rows_.push_back(std::move(cells));
}

std::string TextTable::text(bool color) const {
  std::vector<Cell> header;
  std::vector<std::size_t> widths;
  for (const Column& column : columns_) {
    header.emplace_back(column.title, Style::bold);
    widths.push_back(display_width(column.title));
  }
  for (const auto& cells : rows_)
    for (std::size_t i = 0; i < cells.size(); ++i)
      widths[i] = std::max(widths[i], display_width(cells[i].text));

  std::string text = line_of(header, columns_, widths, color);
  for (const auto& cells : rows_) text += line_of(cells, columns_, widths, color);
  return text;
}

}  // namespace fftune::tool
