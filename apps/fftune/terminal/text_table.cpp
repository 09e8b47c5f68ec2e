#include "apps/fftune/terminal/text_table.hpp"

#include <algorithm>

#include "apps/fftune/terminal/text.hpp"
#include "core/error.hpp"

namespace fftune::tool {

namespace {

constexpr std::size_t gap = 2;     // between columns
constexpr std::size_t indent = 4;  // of what goes below its row
/// Least width of a broken column whose text is longer: narrower ones are hard to read.
constexpr std::size_t readable = 16;

/// A text that would take more lines than these beside other columns goes below its row.
constexpr std::size_t most_lines = 2;

std::string without_last_spaces(std::string text) {
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text;
}

std::size_t longest_word(const std::string& text) {
  std::size_t longest = 0;
  for (const std::string& word : breakable_parts(text))
    longest = std::max(longest, display_width(without_last_spaces(word)));
  return longest;
}

/// A word longer than `width` stands on a line of its own, which is as long as it.
std::vector<std::string> broken(const std::string& text, std::size_t width) {
  if (display_width(text) <= width) return {text};
  std::vector<std::string> lines{""};
  for (const std::string& word : breakable_parts(text)) {
    const std::string longer = lines.back() + word;
    if (!lines.back().empty() && display_width(without_last_spaces(longer)) > width)
      lines.push_back(word);
    else
      lines.back() = longer;
  }
  for (std::string& line : lines) line = without_last_spaces(std::move(line));
  return lines;
}

std::size_t sum_of(const std::vector<std::size_t>& widths) {
  std::size_t sum = widths.empty() ? 0 : gap * (widths.size() - 1);
  for (const std::size_t width : widths) sum += width;
  return sum;
}

/// The widths with the widest lowered, none below its least, until they go into `limit`; they may
/// not even then.
std::vector<std::size_t> lowered(std::vector<std::size_t> widths,
                                 const std::vector<std::size_t>& least, std::size_t limit) {
  for (std::size_t sum = sum_of(widths); sum > limit; --sum) {
    std::size_t* widest = nullptr;
    for (std::size_t i = 0; i < widths.size(); ++i)
      if (widths[i] > least[i] && (widest == nullptr || widths[i] > *widest)) widest = &widths[i];
    if (widest == nullptr) break;
    --*widest;
  }
  return widths;
}

/// Which columns stand beside each other, and how wide they are.
struct Layout {
  std::vector<std::size_t> beside;
  std::vector<std::size_t> widths;
  std::size_t page = 0;  // the width of all
};

/// Column by column, each cell on as many lines as it needs.
std::string lines_beside(const std::vector<Cell>& cells, const std::vector<Column>& columns,
                         const Layout& layout, bool color) {
  std::vector<std::vector<std::string>> parts;
  std::size_t height = 1;
  for (std::size_t i = 0; i < layout.beside.size(); ++i) {
    const std::size_t column = layout.beside[i];
    parts.push_back(broken(column < cells.size() ? cells[column].text : "", layout.widths[i]));
    height = std::max(height, parts.back().size());
  }
  std::string text;
  for (std::size_t line = 0; line < height; ++line) {
    std::size_t owed = 0;  // spaces due before the next text: none are left at a line's end
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const std::size_t column = layout.beside[i];
      const std::string part = line < parts[i].size() ? parts[i][line] : "";
      const std::size_t width = display_width(part);
      const std::size_t padding = layout.widths[i] - std::min(width, layout.widths[i]);
      if (columns[column].align == Align::right) owed += padding;
      if (width > 0) {
        text.append(owed, ' ').append(styled(part, cells[column].style, color));
        owed = 0;
      }
      owed += columns[column].align == Align::left ? padding : 0;
      owed += gap;
    }
    text += "\n";
  }
  return text;
}

/// The cells that have no column beside the others, each on lines of its own.
std::string lines_below(const std::vector<Cell>& cells, const Layout& layout, bool color) {
  std::string text;
  for (std::size_t i = 0; i < cells.size(); ++i) {
    const bool beside =
        std::find(layout.beside.begin(), layout.beside.end(), i) != layout.beside.end();
    if (beside || cells[i].text.empty()) continue;
    for (const std::string& line : broken(cells[i].text, layout.page - indent))
      text += std::string(indent, ' ') + styled(line, cells[i].style, color) + "\n";
  }
  return text;
}

Layout laid_out(const std::vector<Column>& columns, const std::vector<std::size_t>& natural,
                const std::vector<std::size_t>& longest_words, std::size_t page) {
  Layout layout;
  layout.page = page;
  for (std::size_t i = 0; i < columns.size(); ++i) layout.beside.push_back(i);
  while (true) {
    std::vector<std::size_t> widths, least;
    for (const std::size_t i : layout.beside) {
      const std::size_t wanted = columns[i].align == Align::left ? readable : 0;
      widths.push_back(natural[i]);
      least.push_back(std::max(longest_words[i], std::min(natural[i], wanted)));
    }
    layout.widths = lowered(widths, least, page);
    // The first column names the row, and numbers are short.
    std::size_t widest = 0;
    for (std::size_t i = 1; i < widths.size(); ++i)
      if (columns[layout.beside[i]].align == Align::left &&
          (widest == 0 || widths[i] > widths[widest]))
        widest = i;
    if (widest == 0 && widths.size() > 1) widest = widths.size() - 1;
    const bool too_wide = sum_of(layout.widths) > page;
    const bool too_tall = widest > 0 && widths[widest] > most_lines * layout.widths[widest];
    if (widest == 0 || (!too_wide && !too_tall)) return layout;
    layout.beside.erase(layout.beside.begin() + static_cast<std::ptrdiff_t>(widest));
  }
}

}  // namespace

Cell ratio_cell(double ratio) {
  if (!(ratio > 0)) return "-";
  return {ratio_text(ratio), ratio < 0.995 ? Style::caution : Style::plain};
}

Cell ratio_cell(const Ratio& ratio, double known_to) {
  if (!(ratio.median > 0) || ratio.high <= known_to * ratio.low) return ratio_cell(ratio.median);
  return {ratio_range_text(ratio.low, ratio.high),
          ratio.high < 0.995 ? Style::caution : Style::plain};
}

void TextTable::row(std::vector<Cell> cells) {
  if (cells.size() > columns_.size())
    throw Error(ErrorKind::internal, "a table row has more cells than the table has columns");
  for (Cell& cell : cells) cell.text = shown(cell.text);
  rows_.push_back(std::move(cells));
}

std::string TextTable::text(bool color, std::size_t width) const {
  std::vector<Cell> header;
  std::vector<std::size_t> widths, least;
  for (const Column& column : columns_) {
    header.emplace_back(column.title, Style::bold);
    widths.push_back(display_width(column.title));
    least.push_back(longest_word(column.title));
  }
  for (const auto& cells : rows_)
    for (std::size_t i = 0; i < cells.size(); ++i) {
      widths[i] = std::max(widths[i], display_width(cells[i].text));
      least[i] = std::max(least[i], longest_word(cells[i].text));
    }
  const Layout layout = laid_out(columns_, widths, least, std::max(width, 2 * indent));

  std::string text;
  const auto add = [&](const std::vector<Cell>& cells) {
    text += lines_beside(cells, columns_, layout, color) + lines_below(cells, layout, color);
  };
  add(header);
  for (const auto& cells : rows_) add(cells);
  return text;
}

}  // namespace fftune::tool
