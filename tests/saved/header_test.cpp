// Valid contents of a header, and each invalid one, as one line.
#include "saved/header.hpp"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "core/error.hpp"
#include "support/catch.hpp"
#include "support/error_of.hpp"
#include "support/safetensors.hpp"

using namespace fftune;
using fftune::testing::safetensors_bytes;
using fftune::testing::SafetensorsWriter;

namespace {

std::vector<SavedTensor> read(const std::string& bytes) {
  return read_safetensors_header(std::as_bytes(std::span(bytes)), bytes.size());
}

std::string header_complaint(const std::string& bytes) {
  return test::error_of([&] { read(bytes); });
}

/// The error of a header with data of this many bytes.
std::string header_complaint(const std::string& header, std::size_t data) {
  return header_complaint(safetensors_bytes(header, std::string(data, '\0')));
}

}  // namespace

TEST_CASE("a header gives names, types, shapes and places") {
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},)"
      R"("a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},)"
      R"("none":{"dtype":"I64","shape":[0,7],"data_offsets":[4,4]}}   )";
  const auto tensors = read(safetensors_bytes(header, std::string(16, 'x')));
  REQUIRE(tensors.size() == 3);
  CHECK(tensors[0].name == "a");
  CHECK(tensors[0].element == Element::f32);
  CHECK(tensors[0].shape.empty());
  CHECK(tensors[0].elements() == 1);
  CHECK(tensors[0].begin == 8 + header.size());
  CHECK(tensors[1].name == "none");
  CHECK(tensors[1].elements() == 0);
  CHECK(tensors[2].shape == std::vector<std::int64_t>{2, 3});
  CHECK(tensors[2].end == 8 + header.size() + 16);
  CHECK(read(safetensors_bytes("{}", "")).empty());
}

TEST_CASE("a header that contradicts itself or the file is one line that says how") {
  struct Wrong {
    std::string header;
    std::size_t data;
    std::string named;
  };
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  const std::vector<Wrong> all{
      {"", 0, "does not begin with '{'"},
      {"[]", 0, "does not begin with '{'"},
      {"{", 0, "cut short"},
      {R"({"a":})", 0, "not JSON"},
      {R"({"a":3})", 0, "'a' is 3"},
      {R"({"a":{)" + good + R"(},"a":{)" + good + "}}", 8, "'a' is in the header twice"},
      {R"({"a":{)" + good + R"(,"dtype":"F32"}})", 8, "the field 'dtype' twice"},
      {R"({"a":{)" + good + R"(,"more":1}})", 8, "a field 'more'"},
      {R"({"a":{"shape":[2],"data_offsets":[0,8]}})", 8, "lacks the field 'dtype'"},
      {R"({"a":{"dtype":"F32","data_offsets":[0,8]}})", 8, "lacks the field 'shape'"},
      {R"({"a":{"dtype":"F32","shape":[2]}})", 8, "lacks the field 'data_offsets'"},
      {R"({"a":{"dtype":"F31","shape":[2],"data_offsets":[0,8]}})", 8, "unknown dtype \"F31\""},
      {R"({"a":{"dtype":7,"shape":[2],"data_offsets":[0,8]}})", 8, "unknown dtype 7"},
      {R"({"a":{"dtype":"F32","shape":2,"data_offsets":[0,8]}})", 8, "should be an array"},
      {R"({"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}})", 8, "an extent -2"},
      {R"({"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}})", 8, "an extent 2.0"},
      {R"({"a":{"dtype":"F32","shape":[18446744073709551615],"data_offsets":[0,8]}})", 8,
       "an extent 18446744073709551615"},
      {R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8]}})", 8,
       "more bytes than there are addresses"},
      {R"({"a":{"dtype":"F64","shape":[4611686018427387904,2],"data_offsets":[0,0]}})", 0,
       "more bytes than there are addresses"},
      {R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})", 8, "takes 12"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0]}})", 8, "should be two numbers"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 8, "bytes 8 to 0 of 8"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 7, "bytes 0 to 8 of 7"},
      {R"({"a":{)" + good + "}}", 9, "the last 1 bytes belong to no tensor"},
      {R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12,
       "4 bytes ahead of 'a' belong to no tensor"},
      {R"({"a":{)" + good + R"(},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})", 12,
       "'b' begins at byte 4 of the data, within another tensor"},
      {R"({"__metadata__":[]})", 0, "__metadata__ is an array"},
      {R"({"__metadata__":{"a":1}})", 0, "__metadata__ has 1 for 'a'"},
      {R"({"__metadata__":{"a":"","a":""}})", 0, "__metadata__ has 'a' twice"},
  };
  for (const Wrong& wrong : all) {
    const std::string said = header_complaint(wrong.header, wrong.data);
    CAPTURE(wrong.header, said);
    CHECK(said.find(wrong.named) != said.npos);
    CHECK(said.find('\n') == said.npos);
  }
}

TEST_CASE("a file too short for its header is said to be") {
  CHECK_THAT(header_complaint(""), ContainsSubstring("it has 0 bytes"));
  CHECK_THAT(header_complaint(std::string(7, '\0')), ContainsSubstring("it has 7 bytes"));
  CHECK_THAT(header_complaint(std::string(8, '\xff')),
             ContainsSubstring("it is not a safetensors file"));
  const std::string absurd("\xff\xff\xff\x7f\0\0\0\0{}", 10);
  CHECK_THAT(header_complaint(absurd), ContainsSubstring("it is not a safetensors file"));
  const std::string beyond("\x03\0\0\0\0\0\0\0{}", 10);
  CHECK_THAT(header_complaint(beyond), ContainsSubstring("it is cut short"));
  // It had 4 bytes when it was opened, and more when it was read.
  const std::string grown = beyond + std::string(10, ' ');
  CHECK_THROWS_WITH(safetensors_header_end(std::as_bytes(std::span(grown)), 4),
                    ContainsSubstring("it has 4 bytes"));
}

TEST_CASE("a header is as long as the format allows, and no longer") {
  const auto end_of = [](std::uint64_t length) {
    return safetensors_header_end(std::as_bytes(std::span(&length, 1)), std::uint64_t{1} << 40);
  };
  CHECK(end_of(100'000'000) == 100'000'008);
  CHECK_THROWS_WITH(end_of(100'000'001),
                    ContainsSubstring("100000001 bytes, beyond the format's 100000000"));
}

TEST_CASE("a file cut short anywhere is one complaint") {
  SafetensorsWriter writer;
  writer.add("one", "F32", {2, 2}, std::vector<float>{1, 2, 3, 4});
  writer.add("two", "BF16", {3}, std::vector<float>{1, 2, 3});
  const std::string whole = writer.bytes();
  REQUIRE(header_complaint(whole).empty());
  for (std::size_t length = 0; length < whole.size(); ++length)
    if (header_complaint(whole.substr(0, length)).empty()) FAIL("cut at " << length);
}
