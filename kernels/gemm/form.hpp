// The compile-time form of a GemmProblem (form.cuh), and how a kernel's name expression has it.
#pragma once

#include <string>

#include "kernels/gemm/form.cuh"
#include "kernels/gemm/problem.hpp"

namespace fftune {

gemm_form form_of(const GemmProblem& gemm);

/// As a template argument: "fftune::gemm_form{.ab = fftune::element::fp16, ...}". Fields that have
/// their default are left out.
std::string template_argument(const gemm_form& form);

}  // namespace fftune
