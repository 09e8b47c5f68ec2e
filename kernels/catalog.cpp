// The ops there are, listed explicitly.
#include "registry/catalog.hpp"

#include <map>
#include <string>

#include "kernels/act_mul/act_mul.hpp"
#include "kernels/all_argmax/all_argmax.hpp"
#include "kernels/all_reduce/all_reduce.hpp"
#include "kernels/attention/attention.hpp"
#include "kernels/bias_gelu/bias_gelu.hpp"
#include "kernels/causal_conv1d/causal_conv1d.hpp"
#include "kernels/cross_entropy/cross_entropy.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/ffn/ffn.hpp"
#include "kernels/gated_delta_rule/gated_delta_rule.hpp"
#include "kernels/gated_rmsnorm/gated_rmsnorm.hpp"
#include "kernels/head/head.hpp"
#include "kernels/head_linear/head_linear.hpp"
#include "kernels/indexer/indexer.hpp"
#include "kernels/layer/layer.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/linear_cross_entropy/linear_cross_entropy.hpp"
#include "kernels/masked/masked.hpp"
#include "kernels/masked_softmax/masked_softmax.hpp"
#include "kernels/mla/mla.hpp"
#include "kernels/mla_rope/mla_rope.hpp"
#include "kernels/moe/moe.hpp"
#include "kernels/moe_route/moe_route.hpp"
#include "kernels/ngram_block/ngram_block.hpp"
#include "kernels/norm/norm.hpp"
#include "kernels/pack_weight/pack_weight.hpp"
#include "kernels/qkv/qkv.hpp"
#include "kernels/rope/rope.hpp"
#include "kernels/sample/sample.hpp"
#include "kernels/scale/scale.hpp"
#include "kernels/ssd/ssd.hpp"

namespace fftune {

std::map<std::string, std::string> embedded_sources();  // generated from the kernel sources

const Catalog& builtin_catalog() {
  static const SourceSet sources(embedded_sources());
  static const Catalog catalog{{&ffn_op(),
                                &linear_op(),
                                &rmsnorm_op(),
                                &bias_gelu_op(),
                                &act_mul_op(),
                                &rope_op(),
                                &ngram_block_op(),
                                &masked_linear_op(),
                                &masked_ffn_op(),
                                &moe_ffn_op(),
                                &moe_route_op(),
                                &qkv_op(),
                                &attention_op(),
                                &pack_mask_op(),
                                &masked_softmax_op(),
                                &layernorm_op(),
                                &layer_op(),
                                &sample_op(),
                                &head_op(),
                                &pack_weight_op(),
                                &cross_entropy_op(),
                                &linear_cross_entropy_op(),
                                &scale_op(),
                                &decode_op(),
                                &all_reduce_op(),
                                &all_argmax_op(),
                                &causal_conv1d_op(),
                                &gated_rmsnorm_op(),
                                &gated_delta_rule_op(),
                                &ssd_op(),
                                &indexer_op(),
                                &mla_op(),
                                &mla_rope_op(),
                                &head_linear_op()},
                               &sources};
  return catalog;
}

}  // namespace fftune
