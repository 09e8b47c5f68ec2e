#include "support/temporary_folder.hpp"

namespace fftune::testing {

TemporaryFolder::TemporaryFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "fftune-test-XXXXXX").string();
  if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("no temporary folder");
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code error;
  std::filesystem::permissions(path_, std::filesystem::perms::owner_all, error);
  std::filesystem::remove_all(path_, error);
}

bool TemporaryFolder::others_can_reach() const {
  constexpr auto pass = std::filesystem::perms::others_exec;
  const auto folder = std::filesystem::canonical(path_);
  for (auto above = folder.parent_path(); above != above.root_path(); above = above.parent_path())
    if ((std::filesystem::status(above).permissions() & pass) != pass) return false;
  return true;
}

}  // namespace fftune::testing
