#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>

#include "device/parallel.hpp"
#include "kernels/cross_entropy/cross_entropy.hpp"

namespace fftune::cross_entropy {
namespace {

double capped(double logit, double softcap) {
  return softcap > 0 ? softcap * std::tanh(logit / softcap) : logit;
}

double log_sum_exp_of(std::span<const double> z) {
  double most = -std::numeric_limits<double>::infinity();
  for (const double value : z) most = value > most || std::isnan(value) ? value : most;
  if (std::isinf(most) && most < 0) return most;
  double sum = 0;
  for (const double value : z) sum += std::exp(value - most);
  return most + std::log(sum);
}

bool is_id(double label, std::size_t vocab) {
  return label >= 0 && label < static_cast<double>(vocab);
}

}  // namespace

void reference_loss(const Form& form, std::int64_t vocab, ReferenceTensors& tensors,
                    Parallel& parallel) {
  const auto& logits = tensors.at("logits");
  const auto& labels = tensors.at("labels");
  const auto width = static_cast<std::size_t>(vocab);
  const std::size_t rows = labels.size();
  const double smoothing = form.smoothing, z_loss = form.z_loss;
  const double* const weights = form.class_weights ? tensors.at("class_weights").data() : nullptr;
  const auto weight = [&](std::size_t id) { return weights == nullptr ? 1.0 : weights[id]; };
  std::vector<double> loss(rows), lse(rows), logprob(rows), entropy(rows);
  for_each_row(rows, width, parallel, [&](std::size_t row) {
    if (labels[row] == static_cast<double>(form.ignored)) return;
    const bool is_here = is_id(labels[row], width);
    if (!is_here && form.whole == 0) {
      loss[row] = lse[row] = logprob[row] = entropy[row] = std::nan("");
      return;
    }
    std::vector<double> z(width);
    for (std::size_t id = 0; id < width; ++id)
      z[id] = capped(logits[row * width + id], form.softcap);
    const double sum = log_sum_exp_of(z);
    lse[row] = sum;
    if (is_here) {
      const auto label = static_cast<std::size_t>(labels[row]);
      logprob[row] = z[label] - sum;
      loss[row] = (1 - smoothing) * weight(label) * (sum - z[label]);
    }
    if (z_loss > 0) loss[row] += z_loss * sum * sum;
    double smooth = 0, mean = 0;
    for (std::size_t id = 0; id < width; ++id) {
      smooth += weight(id) * (sum - z[id]);
      const double p = std::exp(z[id] - sum);
      if (p != 0) mean += p * z[id];
    }
    if (smoothing > 0) loss[row] += smoothing / static_cast<double>(form.all_ids(vocab)) * smooth;
    entropy[row] = sum - mean;
  });
  if (form.reduction != Reduction::none) {
    double total = 0;
    for (const double one : loss) total += one;
    if (form.reduction == Reduction::mean) total /= tensors.at("items")[0];
    loss = {total};
  }
  tensors["loss"] = std::move(loss);
  tensors["lse"] = std::move(lse);
  if (form.logprobs) tensors["logprob"] = std::move(logprob);
  if (form.entropy) tensors["entropy"] = std::move(entropy);
}

void reference_gradient(const Form& form, std::int64_t vocab, const std::vector<double>* dloss,
                        ReferenceTensors& tensors, Parallel& parallel) {
  const auto& logits = tensors.at("logits");
  const auto& labels = tensors.at("labels");
  const auto& lse = tensors.at("lse");
  const auto width = static_cast<std::size_t>(vocab);
  const auto all_ids = static_cast<double>(form.all_ids(vocab));
  const double smoothing = form.smoothing, share = smoothing / all_ids;
  const double* const weights = form.class_weights ? tensors.at("class_weights").data() : nullptr;
  const auto weight = [&](std::size_t id) { return weights == nullptr ? 1.0 : weights[id]; };
  double all_weights = 0;
  for (std::size_t id = 0; id < width; ++id) all_weights += weight(id);
  if (form.whole > 0) all_weights = all_ids;
  auto gradient = large_vector<double>(logits.size(), parallel);
  for_each_row(labels.size(), width, parallel, [&](std::size_t row) {
    double* const out = gradient.data() + row * width;
    if (labels[row] == static_cast<double>(form.ignored)) return;
    const bool is_here = is_id(labels[row], width);
    if (!is_here && form.whole == 0) {
      std::fill_n(out, width, std::nan(""));
      return;
    }
    const std::size_t label = is_here ? static_cast<std::size_t>(labels[row]) : width;
    double upstream = 1;
    if (dloss != nullptr) upstream = (*dloss)[form.reduction == Reduction::none ? row : 0];
    if (form.reduction == Reduction::mean) upstream /= tensors.at("items")[0];
    const double of_label = (1 - smoothing) * (is_here ? weight(label) : 1);
    for (std::size_t id = 0; id < width; ++id) {
      const double z = capped(logits[row * width + id], form.softcap);
      const double p = std::exp(z - lse[row]);
      double value = of_label * (p - (id == label ? 1 : 0));
      if (smoothing > 0) value += share * (all_weights * p - weight(id));
      if (form.z_loss > 0) value += 2 * form.z_loss * lse[row] * p;
      if (form.softcap > 0) value *= 1 - z / form.softcap * z / form.softcap;
      out[id] = upstream * value;
    }
  });
  tensors["dlogits"] = std::move(gradient);
}

}  // namespace fftune::cross_entropy
