#include "tuning/protocol/answer.hpp"

#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "core/error.hpp"
#include "tuning/protocol/messages.hpp"

namespace fftune {

using nlohmann::json;

json answer_to(const json& call, Evaluator& evaluator, const Evaluator::CompileSink& compiled) {
  const auto name = call.at("call").get<std::string>();
  if (name == "limits")
    return message_of(evaluator.limits(parse_dtype(call.at("dtype").get<std::string>())));
  if (name == "disturbances") return evaluator.disturbances();
  if (name == "begin") {
    evaluator.avoid(call.at("avoid").get<std::set<std::string>>());
    return message_of(evaluator.begin(read_problem(call.at("problem"))));
  }
  if (name == "compile") {
    evaluator.compile(read_candidates(call.at("candidates")), compiled);
    return nullptr;
  }
  if (name == "verify") return message_of(evaluator.verify(read_candidate(call.at("candidate"))));
  if (name == "time") {
    json all = json::array();
    for (const auto& timing : evaluator.time(read_candidates(call.at("candidates")),
                                             read_time_request(call.at("request"))))
      all.push_back(message_of(timing));
    return all;
  }
  throw Error(ErrorKind::internal, "a worker was called for what it does not know");
}

json error_reply(const Error& error) {
  return {{"reply", "error"}, {"kind", error_kind_name(error.kind())}, {"text", error.what()}};
}

}  // namespace fftune
