// A decode step in one launch: the embedding, the layers, the head and the state of the sequences
// (layer/persistent.cu).
#include "core/dtype.hpp"  // its names come before those of device headers

#include "kernels/layer/persistent.cuh"

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kernels/common/cuda_kernel.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/decode/kinds.hpp"
#include "kernels/gemm/packed/packed.hpp"
#include "kernels/head/head.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/sample/sample.hpp"
#include "registry/part_family.hpp"

namespace fftune::decoding {
namespace {

class PersistentToken final : public Family {
 public:
  PersistentToken(const Family& layers, bool packs_head)
      : layers_(layers),
        packs_head_(packs_head),
        name_(std::string(layers.name()) + (packs_head ? "_packed_head" : "")),
        summary_("a decode step in one launch: " + std::string(layers.summary()) +
                 (packs_head ? "; the head's weights are packed" : "")) {}

  std::string_view name() const override { return name_; }
  std::string_view summary() const override { return summary_; }
  DeviceKind device_kind() const override { return DeviceKind::cuda; }
  std::vector<std::string> stages() const override {
    std::vector<std::string> stages{stage_embed};
    for (const std::string& stage : layers_.stages()) stages.push_back("layer." + stage);
    stages.emplace_back("head.norm.forward");
    if (packs_head_) stages.emplace_back("head.product.expand");
    for (const char* stage : {"head.product.product", "head.choose.choose"})
      stages.emplace_back(stage);
    stages.emplace_back(stage_advance);
    return stages;
  }
  std::vector<std::string> sources() const override { return layers_.sources(); }

  std::optional<std::string> refusal(const Problem& problem,
                                     const DeviceFacts& facts) const override {
    if (kinds_of(problem) > 1) return "one launch has layers that are all alike";
    if (auto reason = layers_.refusal(layers_of(problem), facts)) return reason;
    if (packed_format(head_of(problem)).packed != packs_head_)
      return packs_head_ ? "the head has dense weights" : "the head has packed weights";
    if (packs_head_ && problem.size("d") % packed_k != 0)
      return fmt::format("d={}: packed weights of the head need a multiple of {}",
                         problem.size("d"), packed_k);
    if (problem.has("head", "sliced"))
      return "the ids of the slices of a vocabulary are compared before the state advances";
    if (problem.has("choose", "filtered"))
      return "what a filter keeps depends on all logits, which the kernel does not have";
    if (problem.sizes.contains("best"))
      return "the best ids are found among all logits, which the kernel does not have";
    if (problem.size("vocab") < facts.multiprocessors)
      return fmt::format("vocab={} ids for {} SMs: every block needs a part", problem.size("vocab"),
                         facts.multiprocessors);
    return std::nullopt;
  }
  Space space(const Problem& problem, const DeviceFacts& facts) const override {
    return layers_.space(layers_of(problem), facts);
  }
  Config default_config(const Problem& problem, const DeviceFacts& facts) const override {
    return layers_.default_config(layers_of(problem), facts);
  }
  // The head's bytes come at the rate of the layers'.
  std::optional<double> estimate(const Problem& problem, const DeviceFacts& facts,
                                 const Config& config) const override {
    const double bandwidth = 0.9 * (facts.memory_bandwidth > 0 ? facts.memory_bandwidth : 4.8e12);
    const double bytes = cost_of(head_op(), head_of(problem)).bytes;
    const auto layers = layers_.estimate(layers_of(problem), facts, config);
    return layers ? std::optional(*layers + bytes / bandwidth) : std::nullopt;
  }
  // Timed with layers without experts: a token of one, two and four sequences of Llama-3.2-1B takes
  // 899, 928 and 986 us on an H100, and 901, 942 and 995 by the parts.
  bool is_preferred(const Problem& problem, const DeviceFacts& facts) const override {
    return !layer::has_experts(problem) && layers_.is_preferred(layers_of(problem), facts);
  }
  bool covers_repetition() const override { return true; }

  Program program(const Problem& problem, const DeviceFacts& facts,
                  const Config& config) const override {
    const auto repetition = decode_op().repetition(problem);
    const Problem one = repetition ? repetition->one : problem;
    const OpPart layer = *part_named(decode_op().parts(one), "layer");
    const auto tensors = decode_op().tensors(one);
    std::vector<std::size_t> first;  // the tensors of a layer among those of `one`
    for (const TensorSpec& tensor : layer.op->tensors(layer.problem))
      first.push_back(tensor_index(tensors, layer.tensor(tensor.name)));
    std::vector<std::vector<std::size_t>> places{first};
    if (repetition) {
      places.assign(repetition->places.size(), first);
      for (std::size_t i = 0; i < places.size(); ++i)
        for (std::size_t& place : places[i]) place = repetition->places[i][place];
    }
    return layer::persistent_program(layer.problem, places, step_of(problem), facts, config);
  }

 private:
  static Problem layers_of(const Problem& problem) {
    return part_named(decode_op().parts(problem), "layer")->problem;
  }

  static Problem head_of(const Problem& problem) {
    return part_named(decode_op().parts(problem), "head")->problem;
  }

  static layer::DecodeStep step_of(const Problem& problem) {
    const Sequences sequences = sequences_of(problem);
    const Problem head = head_of(problem);
    const PackedFormat format = packed_format(head);
    const OpPart* const choose = part_named(head::parts_of(head), "choose");
    const sample::Form form = sample::form_of(choose->problem);
    const TensorPlaces places(decode_op().tensors(problem));
    const auto set_form = [=](persistent_config& config) {
      config.vocab = static_cast<int>(sequences.vocab);
      config.draws = form.draws;
      config.sums = form.logprobs;
      config.head_bias = head.has("bias", "yes");
      config.rounds_head = !head.has("logits", "f32");
      config.caps_head = form.softcap > 0;
      config.packs_head = format.packed;
      if (format.packed) config.head_format = format.form();
    };
    const auto set_fields = [=](ParameterFields<persistent_token> fields, bool first, bool last) {
      using Token = persistent_token;
      fields.set_tensors(places, &Token::ended, "ended");
      fields.set(&Token::embed_scale, first ? sequences.scale : 1);
      if (first) fields.set_tensors(places, &Token::ids, "ids", &Token::embedding, "embedding");
      if (!last) return;
      fields.set_tensors(places, &Token::final_norm, "final_norm", &Token::head, "w_head",
                         &Token::head_bias, "b_head", &Token::head_scales, "w_head_scale",
                         &Token::head_zeros, "w_head_zero", &Token::temperature, "temperature",
                         &Token::seeds, "seeds", &Token::steps, "steps", &Token::next_ids, "ids",
                         &Token::next_lengths, "lengths", &Token::next_ended, "ended", &Token::out,
                         "out", &Token::limits, "limits", &Token::stop, "stop", &Token::chosen,
                         "chosen", &Token::logit, "logit", &Token::logprob, "logprob");
      fields.set(&Token::softcap, form.softcap, &Token::stops, sequences.stops, &Token::room,
                 sequences.room, &Token::pad, sequences.pad, &Token::chooses, 1);
    };
    return {set_form, places.at("lengths"), set_fields};
  }

  const Family& layers_;
  bool packs_head_;
  std::string name_, summary_;
};

}  // namespace

std::vector<const Family*> persistent_tokens() {
  static const auto families = [] {
    std::vector<std::unique_ptr<const PersistentToken>> all;
    for (const bool packs_head : {false, true})
      for (const Family* layers : layer::layers_of_tokens(packs_head))
        all.push_back(std::make_unique<PersistentToken>(*layers, packs_head));
    return all;
  }();
  std::vector<const Family*> list;
  for (const auto& family : families) list.push_back(family.get());
  return list;
}

}  // namespace fftune::decoding
