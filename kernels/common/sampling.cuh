// The arithmetic of sampling, which has the same bits on every device: pseudo-random numbers by a
// counter, logarithm, exponential and hyperbolic tangent. Plain C++, included by host and device.
//
// `Real` is a float whose operations each round by themselves. On the host that is float, where the
// file is compiled without contraction; on the device the wrapper of common/choice.cuh, because a
// compiler would turn a product and a sum into one multiply-add.
//
// A sample is drawn by exponential variates (the Gumbel-max trick): with E_i independent and
// exponential, argmax(logit_i / temperature - log E_i) is i with the probability softmax_i.
#pragma once

#include "common/types.cuh"

namespace fftune {

struct random_words {
  u32 word[4];
};

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
constexpr random_words philox(u64 key, u64 low, u64 high) {
  u32 k0 = static_cast<u32>(key), k1 = static_cast<u32>(key >> 32);
  random_words c{{static_cast<u32>(low), static_cast<u32>(low >> 32), static_cast<u32>(high),
                  static_cast<u32>(high >> 32)}};
  for (int round = 0; round < 10; ++round) {
    const u64 first = static_cast<u64>(c.word[0]) * 0xD2511F53u,
              second = static_cast<u64>(c.word[2]) * 0xCD9E8D57u;
    c = {{static_cast<u32>(second >> 32) ^ c.word[1] ^ k0, static_cast<u32>(second),
          static_cast<u32>(first >> 32) ^ c.word[3] ^ k1, static_cast<u32>(first)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// The words of ids 4·quad to 4·quad + 3 in a draw of a sequence.
constexpr random_words noise_words(i64 seed, int step, i64 quad) {
  return philox(static_cast<u64>(seed), static_cast<u64>(quad), static_cast<u32>(step));
}

template <class Real>
constexpr Real polynomial(Real, Real sum) {
  return sum;
}
// Horner's rule: coefficients from the highest power on.
template <class Real, class... Rest>
constexpr Real polynomial(Real x, Real sum, Real next, Rest... rest) {
  return polynomial(x, sum * x + next, rest...);
}

constexpr float float_of(float value) {
  return value;
}
template <class Real>
constexpr Real from_bits(u32 bits) {
  return Real(__builtin_bit_cast(float, bits));
}

// The natural logarithm of a positive normal number, as Cephes' logf has it (Moshier 1989).
template <class Real>
constexpr Real log_of(Real value) {
  const u32 bits = __builtin_bit_cast(u32, float_of(value));
  int exponent = static_cast<int>(bits >> 23) - 126;
  Real x = from_bits<Real>((bits & 0x7fffffu) | 0x3f000000u);  // in [0.5, 1)
  if (float_of(x) < 0.707106781f) {
    --exponent;
    x = x + x;
  }
  x = x - Real(1.0f);
  const Real z = x * x, e = Real(static_cast<float>(exponent));
  Real y = polynomial(x, Real(7.0376836292e-2f), Real(-1.1514610310e-1f), Real(1.1676998740e-1f),
                      Real(-1.2420140846e-1f), Real(1.4249322787e-1f), Real(-1.6668057665e-1f),
                      Real(2.0000714765e-1f), Real(-2.4999993993e-1f), Real(3.3333331174e-1f)) *
           x * z;
  y = y + e * Real(-2.12194440e-4f);
  y = y - Real(0.5f) * z;
  return x + y + e * Real(0.693359375f);
}

// exp(value) of a value up to 0, as Cephes' expf has it; 0 below -87.
template <class Real>
constexpr Real exp_of(Real value) {
  if (!(float_of(value) > -87.0f))
    return Real(float_of(value) != float_of(value) ? float_of(value) : 0.0f);
  const int n = static_cast<int>(float_of(value * Real(1.44269504088896341f) - Real(0.5f)));
  const Real whole = Real(static_cast<float>(n));
  const Real x = value - whole * Real(0.693359375f) - whole * Real(-2.12194440e-4f);
  const Real y =
      polynomial(x, Real(1.9875691500e-4f), Real(1.3981999507e-3f), Real(8.3334519073e-3f),
                 Real(4.1665795894e-2f), Real(1.6666665459e-1f), Real(5.0000001201e-1f)) *
          x * x +
      x + Real(1.0f);
  return y * from_bits<Real>(static_cast<u32>(n + 127) << 23);
}

// tanh(value), as Cephes' tanhf has it.
template <class Real>
constexpr Real tanh_of(Real value) {
  const float plain = float_of(value);
  const float size = plain < 0 ? -plain : plain;
  if (size < 0.625f) {
    const Real z = value * value;
    return polynomial(z, Real(-5.70498872745e-3f), Real(2.06390887954e-2f),
                      Real(-5.37397155531e-2f), Real(1.33314422036e-1f), Real(-3.33332819422e-1f)) *
               z * value +
           value;
  }
  if (plain != plain) return value;
  const Real e = exp_of(Real(-2.0f) * Real(size));
  const Real result = (Real(1.0f) - e) / (Real(1.0f) + e);
  return plain < 0 ? Real(0.0f) - result : result;
}

// The soft cap of a logit: cap · tanh(logit / cap).
template <class Real>
constexpr float capped(float logit, float cap) {
  return float_of(Real(cap) * tanh_of(Real(logit) / Real(cap)));
}

// An exponential variate, -log(1 - u) of a uniform u in (0, 1): relative precision where it is
// small, as those are that win. The quotient takes the rounding of 1 - u away again.
template <class Real>
constexpr Real exponential_variate(u32 word) {
  const Real u = Real(static_cast<float>(word)) * Real(0x1p-32f) + Real(0x1p-33f);
  if (float_of(u) >= 1.0f) return Real(16.6355323f);  // of the largest u below 1
  const Real y = Real(1.0f) - u;
  if (float_of(y) == 1.0f) return u;
  return (Real(0.0f) - log_of(y)) * (u / (Real(1.0f) - y));
}

// How a sequence's next id is drawn.
struct draw_of_row {
  float temperature = 0;  // not above 0: the best id
  i64 seed = 0;
  int step = 0;
};

// Infinite for a temperature below 2^-128.
template <class Real>
constexpr float reciprocal_temperature(float temperature) {
  return float_of(Real(1.0f) / Real(temperature));
}

// A score is logit / temperature - log E. Below a temperature of 1 it is that times the
// temperature, so that neither term overflows: ids whose scores are infinite would be equal.
struct score_factors {
  float logit = 1, noise = 1;
};
template <class Real>
constexpr score_factors factors_of_scores(float temperature) {
  if (temperature < 1) return {1, temperature};
  return {reciprocal_temperature<Real>(temperature), 1};
}

// The score of an id. The id with the largest score is drawn.
template <class Real>
constexpr float score_of(float logit, score_factors by, u32 word) {
  return float_of(Real(logit) * Real(by.logit) -
                  Real(by.noise) * log_of(exponential_variate<Real>(word)));
}

// Probability masses are integers, so that their sums do not depend on the order: exp of a logit
// over that of the best, times 2^mass_bits. A vocabulary of 2^19 ids fits into 64 bits.
constexpr int mass_bits = 44;
template <class Real>
constexpr u64 mass_of(float logit, float largest, float reciprocal) {
  const Real difference = Real(logit) - Real(largest);
  // The best ids have all of it, also where the reciprocal is infinite.
  const float e =
      float_of(difference) == 0 ? 1.0f : float_of(exp_of(difference * Real(reciprocal)));
  return e > 0 ? static_cast<u64>(e * 0x1p44f) : 0;
}
// The least mass that is not below `part` of a sum; 0 if the part is not above 0, at most all.
constexpr u64 mass_limit(float part, u64 sum) {
  if (!(part > 0)) return 0;
  if (part >= 1) return sum;
  const double limit = static_cast<double>(part) * static_cast<double>(sum);
  const u64 whole = static_cast<u64>(limit);
  return whole + (static_cast<double>(whole) < limit ? 1 : 0);
}

// Integers in the order of floats, NaN above all, as in PyTorch's argmax and topk: the bits of a
// magnitude are in that order, and those of a negative number in the opposite one.
constexpr int rank_of(float value) {
  if (value != value) return 0x7fffffff;
  const int bits = __builtin_bit_cast(int, value + 0.0f);  // both zeros are +0
  return bits < 0 ? bits ^ 0x7fffffff : bits;
}
// The same without a sign.
constexpr u32 key_of(float value) {
  return static_cast<u32>(rank_of(value)) ^ 0x80000000u;
}

// --- The ids that a filter keeps: those whose keys are at least a threshold ---
//
//   top-k   an id stays if fewer than k ids are better
//   top-p   an id stays if the ids that are better, and that top-k keeps, have a probability below
//   p min-p   an id stays if its probability is at least min-p times that of the best
//
// So each keeps all ids of equal logits, or none. The threshold of top-k and of top-p is found in
// three passes over digits of the keys, the highest digit first. A pass adds up the weights of the
// ids (1, or their mass) by the digit. Then it finds the digit in which the sum of all better ids
// passes the limit.
constexpr int key_digits = 3;
constexpr int digit_bits(int digit) {
  return digit == 0 ? 10 : 11;
}
constexpr int digit_shift(int digit) {
  return digit == 0 ? 22 : digit == 1 ? 11 : 0;
}
constexpr int most_bins = 2048;

}  // namespace fftune
