/* fftune's operations: the fields of their problems, and their buffers in the order in which
 * fftune_plan_run takes them. Generated from the registry by the target ops_header; a test checks
 * that it is current. It declares nothing: it is here to be read.
 *
 * Fields. A problem is a JSON object: "op", "pass", "dtype", and the fields below. Sizes are
 * integers, options are strings; an option that is left out has its first value. A size marked
 * `rare` may be left out, with the meaning that is given there.
 *
 * Buffers. Tensors are row-major, and contiguous unless a field of the op is a stride. Shapes are
 * in elements. T is the problem's dtype; fp8 is e4m3; any other type is as it is named, whichever
 * the dtype. `?` is an extent that follows from strides: fftune_plan_buffer_bytes gives the bytes.
 *
 *   input    only read; no run writes to it
 *   updated  read and written in place: an input and an output in one
 *   output   written whole, whatever it held before
 *
 * Inputs come first, with updated tensors among them, then outputs. No output may overlap another
 * buffer, unless a field says so. A buffer is a device address for a CUDA device and a host address
 * for the CPU. It is aligned to 16 bytes on CUDA, and to one element on the CPU and where a CUDA
 * plan runs fallbacks alone. It belongs to the caller, who keeps it until the run has finished.
 *
 * `kept` marks tensors of the forward pass that a backward pass needs. `sorted` marks rows in the
 * order of the mask: those that it marks, then the others, each in the order of the tokens. `any
 * order` marks sums that are accumulated in the order in which blocks finish: two runs may differ
 * in the last bits.
 *
 * Options and sizes that change the buffers are listed with the buffers that they add or change,
 * each by itself. They combine: fftune_plan_describe lists the buffers of one plan, with bytes and
 * alignment. */
#ifndef FFTUNE_OPS_H
#define FFTUNE_OPS_H

/* ffn: gated feed-forward network: y = (act(x w_gate^T) * (x w_up^T)) w_down^T
 *
 *   m                1 to 2147483647                       tokens (any number)
 *   d                1 to 2147483647                       embedding size
 *   h                1 to 2147483647                       intermediate size
 *   act              silu, gelu, gelu-tanh, relu, none     activation of the gate
 *   save             none, preact                          pass fwd: saved for a backward pass:
 *                                                          gate and up before the activation
 *   save             preact, input                         pass bwd: saved by the forward pass:
 *                                                          gate and up before the activation; or
 *                                                          its input, from which the backward pass
 *                                                          computes them
 *   bias             none, down, both                      pass fwd: biases of every row: down adds
 *                                                          b_down to y; both also adds b_up to the
 *                                                          activation's input (gate=no)
 *   y-scale          no, yes                               pass fwd: whether columns of y are
 *                                                          multiplied by a factor each, before a
 *                                                          residual is added
 *   residual         no, yes                               pass fwd: whether y is added to a
 *                                                          residual of its size
 *   gate             yes, no                               pass fwd: whether the activation's
 *                                                          result gates another product, or is
 *                                                          hidden itself
 *   scales           tensor, block                         pass fwd: granularity of fp8 scales: a
 *                                                          whole tensor, or blocks of 128 elements
 *                                                          (in a weight 128 x 128)
 *   batch-invariant  no, yes                               pass fwd: whether the bits of a row are
 *                                                          the same whatever other rows there are
 *   accumulate       no, yes                               pass bwd: whether the gradients of the
 *                                                          weights are added to others, which may
 *                                                          be the same buffers
 *   frozen           no, yes                               pass bwd: whether the weights have no
 *                                                          gradients
 *   norm             none, rms, add-rms                    pass fwd: norm in front of the products;
 *                                                          rms: RMSNorm of x; add-rms: RMSNorm of x
 *                                                          plus a residual, and their sum is
 *                                                          written
 *   convention       llama, gemma, t5                      pass fwd: where the norm rounds, and
 *                                                          whether w_norm is kept as its distance
 *                                                          from 1
 *   eps              a number from 0 to 1                  pass fwd: added to the norm's mean
 *                                                          square
 *   weights          dense, int4, mxfp4, fp8, int8, nvfp4  pass fwd: format of the weights: dense,
 *                                                          or packed integers (int4, int8), e2m1
 *                                                          (mxfp4, nvfp4) or e4m3 (fp8) with scales
 *   group            128, 64, 32, row                      pass fwd: weights=int4, fp8 or int8:
 *                                                          elements of a row of the weight that
 *                                                          share a scale
 *   zeros            no, yes                               pass fwd: weights=int4: whether each
 *                                                          group has a zero point, instead of 8
 *   quantise         no, token, block                      pass fwd: whether tokens are quantised
 *                                                          to e4m3, for weights of e4m3: with a
 *                                                          scale for each token and row of a
 *                                                          weight, or each 128 elements and block
 *                                                          of 128 x 128
 *
 * Pass fwd: dtype bf16, fp16, f32, fp8 on CUDA; f32, bf16, fp8 on the CPU
 *   0  x       input   T  [m, d]
 *   1  w_gate  input   T  [h, d]
 *   2  w_up    input   T  [h, d]
 *   3  w_down  input   T  [d, h]
 *   4  y       output  T  [m, d]
 * with dtype=fp8: x, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale, hidden_scale,
 *   w_down_scale, y
 *   4  x_scale       input   f32   [1]
 *   5  w_gate_scale  input   f32   [1]
 *   6  w_up_scale    input   f32   [1]
 *   7  hidden_scale  input   f32   [1]
 *   8  w_down_scale  input   f32   [1]
 *   9  y             output  bf16  [m, d]
 * with save=preact: x, w_gate, w_up, w_down, y, gate, up
 *   5  gate  output  T  [m, h]
 *   6  up    output  T  [m, h]
 * with bias=down: x, w_gate, w_up, w_down, b_down, y
 *   4  b_down  input  T  [d]
 * with y-scale=yes: x, w_gate, w_up, w_down, y_scale, y
 *   4  y_scale  input  f32  [d]
 * with residual=yes: x, w_gate, w_up, w_down, residual, y
 *   4  residual  input  T  [m, d]
 * with gate=no: x, w_up, w_down, y
 * with norm=rms: x, w_gate, w_up, w_down, w_norm, y
 *   4  w_norm  input  T  [d]
 * with norm=add-rms: x, w_gate, w_up, w_down, x_residual, w_norm, y, sum
 *   4  x_residual  input   T  [m, d]
 *   5  w_norm      input   T  [d]
 *   7  sum         output  T  [m, d]
 * with weights=int4: x, w_gate, w_up, w_down, w_gate_scale, w_up_scale, w_down_scale, y
 *   1  w_gate        input  u8  [ceil(h / 16) * ceil(d / 64) + 1, 512]
 *   2  w_up          input  u8  [ceil(h / 16) * ceil(d / 64) + 1, 512]
 *   3  w_down        input  u8  [ceil(d / 16) * ceil(h / 64) + 1, 512]
 *   4  w_gate_scale  input  T   [ceil(h / 16), ceil(d / 128), 16]
 *   5  w_up_scale    input  T   [ceil(h / 16), ceil(d / 128), 16]
 *   6  w_down_scale  input  T   [ceil(d / 16), ceil(h / 128), 16]
 * with weights=mxfp4: x, w_gate, w_up, w_down, w_gate_scale, w_up_scale, w_down_scale, y
 *   1  w_gate        input  u8  [ceil(h / 16) * ceil(d / 64) + 1, 512]
 *   2  w_up          input  u8  [ceil(h / 16) * ceil(d / 64) + 1, 512]
 *   3  w_down        input  u8  [ceil(d / 16) * ceil(h / 64) + 1, 512]
 *   4  w_gate_scale  input  u8  [ceil(h / 16), ceil(d / 32), 16]
 *   5  w_up_scale    input  u8  [ceil(h / 16), ceil(d / 32), 16]
 *   6  w_down_scale  input  u8  [ceil(d / 16), ceil(h / 32), 16]
 * with weights=fp8: x, w_gate, w_up, w_down, w_gate_scale, w_up_scale, w_down_scale, y
 *   1  w_gate        input  u8   [2 * ceil(h / 16) * ceil(d / 64) + 1, 512]
 *   2  w_up          input  u8   [2 * ceil(h / 16) * ceil(d / 64) + 1, 512]
 *   3  w_down        input  u8   [2 * ceil(d / 16) * ceil(h / 64) + 1, 512]
 *   4  w_gate_scale  input  f32  [ceil(h / 16), ceil(d / 128), 16]
 *   5  w_up_scale    input  f32  [ceil(h / 16), ceil(d / 128), 16]
 *   6  w_down_scale  input  f32  [ceil(d / 16), ceil(h / 128), 16]
 * with weights=int8: x, w_gate, w_up, w_down, w_gate_scale, w_up_scale, w_down_scale, y
 *   1  w_gate        input  u8   [2 * ceil(h / 16) * ceil(d / 64) + 1, 512]
 *   2  w_up          input  u8   [2 * ceil(h / 16) * ceil(d / 64) + 1, 512]
 *   3  w_down        input  u8   [2 * ceil(d / 16) * ceil(h / 64) + 1, 512]
 *   4  w_gate_scale  input  f32  [ceil(h / 16), ceil(d / 128), 16]
 *   5  w_up_scale    input  f32  [ceil(h / 16), ceil(d / 128), 16]
 *   6  w_down_scale  input  f32  [ceil(d / 16), ceil(h / 128), 16]
 * with weights=nvfp4: x, w_gate, w_up, w_down, w_gate_scale, w_up_scale, w_down_scale, y
 *   1  w_gate        input  u8  [ceil(h / 16) * ceil(d / 64) + 1, 512]
 *   2  w_up          input  u8  [ceil(h / 16) * ceil(d / 64) + 1, 512]
 *   3  w_down        input  u8  [ceil(d / 16) * ceil(h / 64) + 1, 512]
 *   4  w_gate_scale  input  u8  [ceil(h / 16), ceil(d / 32) + 2, 32]
 *   5  w_up_scale    input  u8  [ceil(h / 16), ceil(d / 32) + 2, 32]
 *   6  w_down_scale  input  u8  [ceil(d / 16), ceil(h / 32) + 2, 32]
 * with quantise=token: x, w_gate, w_up, w_down, w_gate_scale, w_up_scale, w_down_scale, y
 *   1  w_gate        input  fp8  [h, d]
 *   2  w_up          input  fp8  [h, d]
 *   3  w_down        input  fp8  [d, h]
 *   4  w_gate_scale  input  f32  [h]
 *   5  w_up_scale    input  f32  [h]
 *   6  w_down_scale  input  f32  [d]
 * with quantise=block: x, w_gate, w_up, w_down, w_gate_scale, w_up_scale, w_down_scale, y
 *   1  w_gate        input  fp8  [h, d]
 *   2  w_up          input  fp8  [h, d]
 *   3  w_down        input  fp8  [d, h]
 *   4  w_gate_scale  input  f32  [ceil(h / 128), ceil(d / 128)]
 *   5  w_up_scale    input  f32  [ceil(h / 128), ceil(d / 128)]
 *   6  w_down_scale  input  f32  [ceil(d / 128), ceil(h / 128)]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0   dy       input   T  [m, d]
 *   1   x        input   T  [m, d], kept
 *   2   gate     input   T  [m, h], kept
 *   3   up       input   T  [m, h], kept
 *   4   w_gate   input   T  [h, d]
 *   5   w_up     input   T  [h, d]
 *   6   w_down   input   T  [d, h]
 *   7   dx       output  T  [m, d]
 *   8   dw_gate  output  T  [h, d]
 *   9   dw_up    output  T  [h, d]
 *   10  dw_down  output  T  [d, h]
 * with save=input: dy, x, w_gate, w_up, w_down, dx, dw_gate, dw_up, dw_down
 * with accumulate=yes: dy, x, gate, up, w_gate, w_up, w_down, dw_gate_before, dw_up_before,
 *   dw_down_before, dx, dw_gate, dw_up, dw_down
 *   7  dw_gate_before  input  T  [h, d]
 *   8  dw_up_before    input  T  [h, d]
 *   9  dw_down_before  input  T  [d, h]
 * with frozen=yes: dy, gate, up, w_gate, w_up, w_down, dx */

/* linear: linear layer: y = x w^T (+ bias)
 *
 *   m                1 to 2147483647                       tokens (any number)
 *   k                1 to 2147483647                       input features
 *   n                1 to 2147483647                       output features
 *   bias             no, yes                               whether y has a bias, and the backward
 *                                                          pass its gradient
 *   y-scale          no, yes                               pass fwd: whether columns of y are
 *                                                          multiplied by a factor each, before a
 *                                                          residual is added
 *   residual         no, yes                               pass fwd: whether y is added to a
 *                                                          residual of its size
 *   output           same, f32                             pass fwd: element type of y: that of x
 *                                                          and w, or f32
 *   batch-invariant  no, yes                               pass fwd: whether the bits of a row are
 *                                                          the same whatever other rows there are
 *   accumulate       no, yes                               pass bwd: whether the gradients of w and
 *                                                          bias are added to others, which may be
 *                                                          the same buffers
 *   weights          dense, int4, mxfp4, fp8, int8, nvfp4  pass fwd: format of the weights: dense,
 *                                                          or packed integers (int4, int8), e2m1
 *                                                          (mxfp4, nvfp4) or e4m3 (fp8) with scales
 *   group            128, 64, 32, row                      pass fwd: weights=int4, fp8 or int8:
 *                                                          elements of a row of the weight that
 *                                                          share a scale
 *   zeros            no, yes                               pass fwd: weights=int4: whether each
 *                                                          group has a zero point, instead of 8
 *   quantise         no, token, block                      pass fwd: whether tokens are quantised
 *                                                          to e4m3, for weights of e4m3: with a
 *                                                          scale for each token and row of a
 *                                                          weight, or each 128 elements and block
 *                                                          of 128 x 128
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x  input   T  [m, k]
 *   1  w  input   T  [n, k]
 *   2  y  output  T  [m, n]
 * with bias=yes: x, w, bias, y
 *   2  bias  input  T  [n]
 * with y-scale=yes: x, w, y_scale, y
 *   2  y_scale  input  f32  [n]
 * with residual=yes: x, w, residual, y
 *   2  residual  input  T  [m, n]
 * with weights=int4: x, w, w_scale, y
 *   1  w        input  u8  [ceil(n / 16) * ceil(k / 64) + 1, 512]
 *   2  w_scale  input  T   [ceil(n / 16), ceil(k / 128), 16]
 * with weights=mxfp4: x, w, w_scale, y
 *   1  w        input  u8  [ceil(n / 16) * ceil(k / 64) + 1, 512]
 *   2  w_scale  input  u8  [ceil(n / 16), ceil(k / 32), 16]
 * with weights=fp8: x, w, w_scale, y
 *   1  w        input  u8   [2 * ceil(n / 16) * ceil(k / 64) + 1, 512]
 *   2  w_scale  input  f32  [ceil(n / 16), ceil(k / 128), 16]
 * with weights=int8: x, w, w_scale, y
 *   1  w        input  u8   [2 * ceil(n / 16) * ceil(k / 64) + 1, 512]
 *   2  w_scale  input  f32  [ceil(n / 16), ceil(k / 128), 16]
 * with weights=nvfp4: x, w, w_scale, y
 *   1  w        input  u8  [ceil(n / 16) * ceil(k / 64) + 1, 512]
 *   2  w_scale  input  u8  [ceil(n / 16), ceil(k / 32) + 2, 32]
 * with quantise=token: x, w, w_scale, y
 *   1  w        input  fp8  [n, k]
 *   2  w_scale  input  f32  [n]
 * with quantise=block: x, w, w_scale, y
 *   1  w        input  fp8  [n, k]
 *   2  w_scale  input  f32  [ceil(n / 128), ceil(k / 128)]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  dy  input   T  [m, n]
 *   1  x   input   T  [m, k], kept
 *   2  w   input   T  [n, k]
 *   3  dx  output  T  [m, k]
 *   4  dw  output  T  [n, k]
 * with bias=yes: dy, x, w, dx, dw, dbias
 *   5  dbias  output  T  [n]
 * with accumulate=yes: dy, x, w, dw_before, dx, dw
 *   3  dw_before  input  T  [n, k] */

/* rmsnorm: root mean square normalisation: y = x / sqrt(mean(x^2) + eps) * w
 *
 *   m                1 to 2147483647       tokens (any number)
 *   d                1 to 65536            features of a token
 *   convention       llama, gemma, t5      where it rounds, and whether w is kept as its distance
 *                                          from 1
 *   residual         no, yes, after        add a residual first, and write the sum too; after: add
 *                                          it to y
 *   save             nothing, rstd         kept by the forward pass for the backward pass
 *   weights          same, f32             element type of w and dw: the op's, or f32
 *   eps              a number from 0 to 1  added to the mean square
 *   output           same, fp8, i8         element type of y: the op's, or one quantised with a
 *                                          scale for each token
 *   batch-invariant  no, yes               pass fwd: whether the bits of a row are the same
 *                                          whatever other rows there are
 *   frozen           no, yes               pass bwd: whether the weights have no gradients
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x  input   T  [m, d]
 *   1  w  input   T  [d]
 *   2  y  output  T  [m, d]
 * with residual=yes: x, residual, w, y, sum
 *   1  residual  input   T  [m, d]
 *   4  sum       output  T  [m, d]
 * with residual=after: x, residual, w, y
 *   1  residual  input  T  [m, d]
 * with save=rstd: x, w, y, rstd
 *   3  rstd  output  f32  [m]
 * with output=fp8: x, w, y, scale
 *   2  y      output  fp8  [m, d]
 *   3  scale  output  f32  [m]
 * with output=i8: x, w, y, scale
 *   2  y      output  i8   [m, d]
 *   3  scale  output  f32  [m]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x   input   T  [m, d]
 *   1  w   input   T  [d]
 *   2  dy  input   T  [m, d]
 *   3  dx  output  T  [m, d]
 *   4  dw  output  T  [d]
 * with residual=yes: x, w, dy, dsum, dx, dw
 *   3  dsum  input  T  [m, d]
 * with save=rstd: x, w, dy, rstd, dx, dw
 *   3  rstd  input  f32  [m]
 * with frozen=yes: x, w, dy, dx */

/* bias-gelu: y = gelu(x + bias)
 *
 *   m       1 to 2147483647  tokens (any number)
 *   h       1 to 2147483647  features of a token
 *   act     gelu, gelu-tanh  which gelu: with erf, or its form with tanh
 *   biases  same, f32        element type of bias and dbias: the op's, or f32
 *   save    nothing, input   kept by the forward pass for the backward pass: nothing but x, or
 *                            gelu's input
 *   frozen  no, yes          pass bwd: whether biases have no gradients
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x     input   T  [m, h]
 *   1  bias  input   T  [h]
 *   2  y     output  T  [m, h]
 * with save=input: x, bias, y, input
 *   3  input  output  T  [m, h]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x      input   T  [m, h]
 *   1  bias   input   T  [h]
 *   2  dy     input   T  [m, h]
 *   3  dx     output  T  [m, h]
 *   4  dbias  output  T  [h]
 * with save=input: input, dy, dx, dbias
 *   0  input  input  T  [m, h]
 * with frozen=yes: x, bias, dy, dx */

/* act-mul: out = act(gate) * up
 *
 *   m       1 to 2147483647              tokens (any number)
 *   h       1 to 2147483647              features of a token in out
 *   act     silu, gelu, gelu-tanh, relu  activation of the gate
 *   packed  no, yes                      gate and up are the halves of each row of one tensor
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  gate  input   T  [m, h]
 *   1  up    input   T  [m, h]
 *   2  out   output  T  [m, h]
 * with packed=yes: gate_up, out
 *   0  gate_up  input  T  [m, 2 * h]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  gate   input   T  [m, h]
 *   1  up     input   T  [m, h]
 *   2  dout   input   T  [m, h]
 *   3  dgate  output  T  [m, h]
 *   4  dup    output  T  [m, h]
 * with packed=yes: gate_up, dout, dgate_up
 *   0  gate_up   input   T  [m, 2 * h]
 *   2  dgate_up  output  T  [m, 2 * h] */

/* rope: rotary position embedding of queries and keys: y = x * cos(f) + rotated(x) * sin(f)
 *
 *   s          1 to 16777216                     tokens of a sequence; in layout thd of all
 *                                                sequences together (any number)
 *   b          1 to 65536                        sequences
 *   heads      1 to 1024                         heads of q
 *   dim        1 to 1024                         features of a head
 *   kv-heads   1 to 1024, rare                   heads of k, rotated in the same launch; none if
 *                                                left out
 *   rotary     1 to 1024, rare                   features of a head to rotate, an even number; all
 *                                                if left out
 *   positions  1 to 2147483647, rare             rows of the table of angles; s if left out
 *   q-row      1 to 17179869184, rare            stride of q between tokens, in elements, for a
 *                                                part of a packed row; heads * dim if left out
 *   q-outer    1 to 17179869184, rare            stride of q between sequences in bshd, between
 *                                                positions in sbhd; contiguous if left out
 *   q-head     1 to 17179869184, rare            stride of q between heads; dim if left out
 *   k-row      1 to 17179869184, rare            as q-row, for k; kv-heads * dim if left out
 *   k-outer    1 to 17179869184, rare            as q-outer, for k
 *   k-head     1 to 17179869184, rare            as q-head, for k; dim if left out
 *   layout     sbhd, bshd, thd                   order of q and k: [s, b, heads, dim], [b, s,
 *                                                heads, dim], or packed sequences
 *   rotation   halves, interleaved               pairs are features rotary/2 apart, or neighbours
 *   angles     table, base, llama3, yarn         a table is given, or the rule by which frequencies
 *                                                are computed
 *   starts     no, yes                           each sequence's first position is given
 *   base       a number from 1 to 1000000000000  base of the computed frequencies
 *   factor     a number from 0.001 to 1000000    factor by which the rule stretches positions
 *   context    a number from 1 to 1000000000     positions that the model was trained with
 *   low        a number from 0.001 to 1000000    llama3: context/low is the longest wavelength that
 *                                                is interpolated
 *   high       a number from 0.001 to 1000000    llama3: context/high is the longest wavelength
 *                                                that is left alone
 *   beta-fast  a number from 0.001 to 1000000    yarn: rotations in the context from which a pair
 *                                                is left alone
 *   beta-slow  a number from 0.001 to 1000000    yarn: rotations in the context up to which a pair
 *                                                is stretched
 *   scale      a number from 0 to 1000000        factor of all sines and cosines; 0: the rule's own
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  q       input   T    [s, b, heads, dim]
 *   1  angles  input   f32  [s, dim]
 *   2  q_out   output  T    [s, b, heads, dim]
 * with kv-heads: q, k, angles, q_out, k_out
 *   1  k      input   T  [s, b, kv-heads, dim]
 *   4  k_out  output  T  [s, b, kv-heads, dim]
 * with rotary: q, angles, q_out
 *   1  angles  input  f32  [s, rotary]
 * with positions: q, angles, q_out
 *   1  angles  input  f32  [positions, dim]
 * with q-row: q, angles, q_out
 *   0  q  input  T  [?]
 * with q-outer: q, angles, q_out
 *   0  q  input  T  [?]
 * with q-head: q, angles, q_out
 *   0  q  input  T  [?]
 * with layout=bshd: q, angles, q_out
 *   0  q      input   T  [b, s, heads, dim]
 *   2  q_out  output  T  [b, s, heads, dim]
 * with layout=thd: q, angles, offsets, q_out
 *   0  q        input   T    [s, heads, dim]
 *   2  offsets  input   i32  [b + 1]
 *   3  q_out    output  T    [s, heads, dim]
 * with angles=base: q, q_out
 * with angles=llama3: q, q_out
 * with angles=yarn: q, q_out
 * with starts=yes: q, angles, starts, q_out
 *   2  starts  input  i32  [b]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  dq_out  input   T    [s, b, heads, dim]
 *   1  angles  input   f32  [s, dim]
 *   2  dq      output  T    [s, b, heads, dim]
 * with kv-heads: dq_out, dk_out, angles, dq, dk
 *   1  dk_out  input   T  [s, b, kv-heads, dim]
 *   4  dk      output  T  [s, b, kv-heads, dim]
 * with rotary: dq_out, angles, dq
 *   1  angles  input  f32  [s, rotary]
 * with positions: dq_out, angles, dq
 *   1  angles  input  f32  [positions, dim]
 * with q-row: dq_out, angles, dq
 *   0  dq_out  input  T  [?]
 * with q-outer: dq_out, angles, dq
 *   0  dq_out  input  T  [?]
 * with q-head: dq_out, angles, dq
 *   0  dq_out  input  T  [?]
 * with layout=bshd: dq_out, angles, dq
 *   0  dq_out  input   T  [b, s, heads, dim]
 *   2  dq      output  T  [b, s, heads, dim]
 * with layout=thd: dq_out, angles, offsets, dq
 *   0  dq_out   input   T    [s, heads, dim]
 *   2  offsets  input   i32  [b + 1]
 *   3  dq       output  T    [s, heads, dim]
 * with angles=base: dq_out, dq
 * with angles=llama3: dq_out, dq
 * with angles=yarn: dq_out, dq
 * with starts=yes: dq_out, angles, starts, dq
 *   2  starts  input  i32  [b] */

/* ngram-block: logits of tokens that would repeat an n-gram of their row become -inf
 *
 *   b        1 to 2147483647                    rows: sequences, or beams (any number)
 *   len      1 to 131072                        ids of a row; with a prefix, those after it
 *   vocab    1 to 524288                        logits of a row
 *   prefix   1 to 131072, rare                  ids of a prefix that rows share, before their own;
 *                                               none if left out
 *   beams    1 to 65536, rare                   rows after each other that share a prefix; 1 if
 *                                               left out
 *   ids      i32, i64                           element type of the ids
 *   lengths  whole, own                         lengths of rows and prefixes: all of len and
 *                                               prefix, or each its own
 *   ngrams   one, own                           one n for all rows, or each its own
 *   n        a number from 1 to 131072          tokens of an n-gram, a whole number
 *   padding  a number from -1000000 to 1000000  the id that never matches, a whole number
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  ids      input    i32  [b, len]
 *   1  logits   updated  T    [b, vocab]
 *   2  invalid  output   i32  [b]
 * with prefix: ids, logits, prefix, invalid
 *   2  prefix  input  i32  [b, prefix]
 * with ids=i64: ids, logits, invalid
 *   0  ids  input  i64  [b, len]
 * with lengths=own: ids, logits, lengths, invalid
 *   2  lengths  input  i32  [b]
 * with ngrams=own: ids, logits, n, invalid
 *   2  n  input  i32  [b] */

/* masked-linear: linear layer of two experts: y_i = x_i w_true^T where mask_i, else x_i w_false^T
 *
 *   m           1 to 2147483647  tokens (any number)
 *   k           1 to 2147483647  input features
 *   n           1 to 2147483647  output features
 *   mask                         all, none, or block:SHARE, tail:SHARE, even:SHARE, random:SHARE
 *                                with a share from 0 to 1: distribution of the masks, for test data
 *                                and the choice of a preset
 *   accumulate  no, yes          pass bwd: whether the gradients of the weights are added to
 *                                others, which may be the same buffers
 *   frozen      no, yes          pass bwd: whether the weights have no gradients
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x        input   T   [m, k]
 *   1  mask     input   u8  [m]
 *   2  w_true   input   T   [n, k]
 *   3  w_false  input   T   [n, k]
 *   4  y        output  T   [m, n]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  dy        input   T   [m, n]
 *   1  x         input   T   [m, k], kept
 *   2  mask      input   u8  [m], kept
 *   3  w_true    input   T   [n, k]
 *   4  w_false   input   T   [n, k]
 *   5  dx        output  T   [m, k]
 *   6  dw_true   output  T   [n, k]
 *   7  dw_false  output  T   [n, k]
 * with accumulate=yes: dy, x, mask, w_true, w_false, dw_true_before, dw_false_before, dx,
 *   dw_true, dw_false
 *   5  dw_true_before   input  T  [n, k]
 *   6  dw_false_before  input  T  [n, k]
 * with frozen=yes: dy, mask, w_true, w_false, dx */

/* masked-ffn: gated feed-forward network of two experts: ffn with the true one's weights where
 *   mask_i, else with the false one's
 *
 *   m           1 to 2147483647                    tokens (any number)
 *   d           1 to 2147483647                    embedding size
 *   h           1 to 2147483647                    intermediate size
 *   act         silu, gelu, gelu-tanh, relu, none  activation of the gate
 *   mask                                           all, none, or block:SHARE, tail:SHARE,
 *                                                  even:SHARE, random:SHARE with a share from 0 to
 *                                                  1: distribution of the masks, for test data and
 *                                                  the choice of a preset
 *   save        none, preact                       pass fwd: saved for a backward pass: gate and up
 *                                                  before the activation, in the order of the mask
 *   save        preact, input                      pass bwd: saved by the forward pass: gate and up
 *                                                  before the activation, in the order of the mask;
 *                                                  or its input, from which the backward pass
 *                                                  computes them
 *   accumulate  no, yes                            pass bwd: whether the gradients of the weights
 *                                                  are added to others, which may be the same
 *                                                  buffers
 *   frozen      no, yes                            pass bwd: whether the weights have no gradients
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x             input   T   [m, d]
 *   1  mask          input   u8  [m]
 *   2  w_gate_true   input   T   [h, d]
 *   3  w_up_true     input   T   [h, d]
 *   4  w_down_true   input   T   [d, h]
 *   5  w_gate_false  input   T   [h, d]
 *   6  w_up_false    input   T   [h, d]
 *   7  w_down_false  input   T   [d, h]
 *   8  y             output  T   [m, d]
 * with save=preact: x, mask, w_gate_true, w_up_true, w_down_true, w_gate_false, w_up_false,
 *   w_down_false, y, gate, up
 *   9   gate  output  T  [m, h], sorted
 *   10  up    output  T  [m, h], sorted
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0   dy             input   T   [m, d]
 *   1   x              input   T   [m, d], kept
 *   2   mask           input   u8  [m], kept
 *   3   gate           input   T   [m, h], kept, sorted
 *   4   up             input   T   [m, h], kept, sorted
 *   5   w_gate_true    input   T   [h, d]
 *   6   w_up_true      input   T   [h, d]
 *   7   w_down_true    input   T   [d, h]
 *   8   w_gate_false   input   T   [h, d]
 *   9   w_up_false     input   T   [h, d]
 *   10  w_down_false   input   T   [d, h]
 *   11  dx             output  T   [m, d]
 *   12  dw_gate_true   output  T   [h, d]
 *   13  dw_up_true     output  T   [h, d]
 *   14  dw_down_true   output  T   [d, h]
 *   15  dw_gate_false  output  T   [h, d]
 *   16  dw_up_false    output  T   [h, d]
 *   17  dw_down_false  output  T   [d, h]
 * with save=input: dy, x, mask, w_gate_true, w_up_true, w_down_true, w_gate_false, w_up_false,
 *   w_down_false, dx, dw_gate_true, dw_up_true, dw_down_true, dw_gate_false, dw_up_false,
 *   dw_down_false
 * with accumulate=yes: dy, x, mask, gate, up, w_gate_true, w_up_true, w_down_true, w_gate_false,
 *   w_up_false, w_down_false, dw_gate_true_before, dw_up_true_before, dw_down_true_before,
 *   dw_gate_false_before, dw_up_false_before, dw_down_false_before, dx, dw_gate_true, dw_up_true,
 *   dw_down_true, dw_gate_false, dw_up_false, dw_down_false
 *   11  dw_gate_true_before   input  T  [h, d]
 *   12  dw_up_true_before     input  T  [h, d]
 *   13  dw_down_true_before   input  T  [d, h]
 *   14  dw_gate_false_before  input  T  [h, d]
 *   15  dw_up_false_before    input  T  [h, d]
 *   16  dw_down_false_before  input  T  [d, h]
 * with frozen=yes: dy, mask, gate, up, w_gate_true, w_up_true, w_down_true, w_gate_false,
 *   w_up_false, w_down_false, dx */

/* moe-ffn: mixture of experts: y_t = sum_j weights_tj * ffn of expert ids_tj (x_t)
 *
 *   m                1 to 2147483647                       tokens (any number)
 *   d                1 to 2147483647                       embedding size
 *   h                1 to 2147483647                       intermediate size of an expert
 *   top-k            1 to 32                               experts that a token chooses
 *   experts          1 to 1024                             experts to choose from
 *   shared           1 to 8, rare                          experts that every token goes through
 *                                                          with weight 1, the last ones of the
 *                                                          stacked weights; left out: none
 *   own-experts      1 to 1024, rare                       experts in the weights, the slice of a
 *                                                          rank of a group: the tensor first_expert
 *                                                          says which; all if left out
 *   act                                                    silu, gelu, gelu-tanh, relu, none,
 *                                                          swiglu-oai: activation of the gate;
 *                                                          swiglu-oai limits gate and up and adds 1
 *                                                          to up
 *   routing                                                uniform, or zipf:SKEW with a skew from 0
 *                                                          to 4, or file:IDS, a text file of ids:
 *                                                          distribution of the chosen experts, for
 *                                                          test data and the choice of a preset
 *   save             none, preact                          pass fwd: saved for a backward pass:
 *                                                          gate and up before the activation, in
 *                                                          the order of the experts
 *   save             preact, input                         pass bwd: saved by the forward pass:
 *                                                          gate and up before the activation, in
 *                                                          the order of the experts; or its input,
 *                                                          from which the backward pass computes
 *                                                          them
 *   weigh            after, before                         factor of the weights of a token's
 *                                                          choices: its experts' outputs, or its
 *                                                          row before them
 *   gate-up          separate, halves, interleaved         the experts' weights of gate and up:
 *                                                          separate, or one w_gate_up; halves: rows
 *                                                          of gate, then of up; interleaved: they
 *                                                          alternate
 *   bias             none, all                             whether gate, up and an expert's output
 *                                                          have biases
 *   residual         no, yes                               pass fwd: whether y is added to a
 *                                                          residual of its size
 *   scales           tensor, token, block                  pass fwd: granularity of fp8 scales: a
 *                                                          whole tensor, of an expert; a token, and
 *                                                          a row of a weight; or blocks of 128
 *                                                          elements (in a weight 128 x 128)
 *   batch-invariant  no, yes                               pass fwd: whether the bits of a row are
 *                                                          the same whatever other rows there are
 *   accumulate       no, yes                               pass bwd: whether the gradients of the
 *                                                          weights and biases are added to others,
 *                                                          which may be the same buffers
 *   frozen           no, yes                               pass bwd: whether the weights and biases
 *                                                          have no gradients
 *   weights          dense, int4, mxfp4, fp8, int8, nvfp4  pass fwd: format of the weights: dense,
 *                                                          or packed integers (int4, int8), e2m1
 *                                                          (mxfp4, nvfp4) or e4m3 (fp8) with scales
 *   group            128, 64, 32, row                      pass fwd: weights=int4, fp8 or int8:
 *                                                          elements of a row of the weight that
 *                                                          share a scale
 *   zeros            no, yes                               pass fwd: weights=int4: whether each
 *                                                          group has a zero point, instead of 8
 *   quantise         no, token, block                      pass fwd: whether tokens are quantised
 *                                                          to e4m3, for weights of e4m3: with a
 *                                                          scale for each token and row of a
 *                                                          weight, or each 128 elements and block
 *                                                          of 128 x 128
 *
 * Pass fwd: dtype bf16, fp16, f32, fp8 on CUDA; f32, bf16, fp8 on the CPU
 *   0  x        input   T    [m, d]
 *   1  ids      input   i32  [m, top-k]
 *   2  weights  input   f32  [m, top-k]
 *   3  w_gate   input   T    [experts, h, d]
 *   4  w_up     input   T    [experts, h, d]
 *   5  w_down   input   T    [experts, d, h]
 *   6  y        output  T    [m, d]
 * with dtype=fp8: x, ids, weights, w_gate, w_up, w_down, x_scale, w_gate_scale, w_up_scale,
 *   hidden_scale, w_down_scale, y
 *   6   x_scale       input   f32   [1]
 *   7   w_gate_scale  input   f32   [experts]
 *   8   w_up_scale    input   f32   [experts]
 *   9   hidden_scale  input   f32   [1]
 *   10  w_down_scale  input   f32   [experts]
 *   11  y             output  bf16  [m, d]
 * with shared: x, ids, weights, w_gate, w_up, w_down, y
 *   3  w_gate  input  T  [experts + shared, h, d]
 *   4  w_up    input  T  [experts + shared, h, d]
 *   5  w_down  input  T  [experts + shared, d, h]
 * with own-experts: x, ids, first_expert, weights, w_gate, w_up, w_down, y
 *   2  first_expert  input  i32  [1]
 *   4  w_gate        input  T    [own-experts, h, d]
 *   5  w_up          input  T    [own-experts, h, d]
 *   6  w_down        input  T    [own-experts, d, h]
 * with save=preact: x, ids, weights, w_gate, w_up, w_down, y, gate, up
 *   7  gate  output  T  [m * top-k, h]
 *   8  up    output  T  [m * top-k, h]
 * with gate-up=halves: x, ids, weights, w_gate_up, w_down, y
 *   3  w_gate_up  input  T  [experts, 2 * h, d]
 * with gate-up=interleaved: x, ids, weights, w_gate_up, w_down, y
 *   3  w_gate_up  input  T  [experts, 2 * h, d]
 * with bias=all: x, ids, weights, w_gate, w_up, w_down, b_gate, b_up, b_down, y
 *   6  b_gate  input  T  [experts, h]
 *   7  b_up    input  T  [experts, h]
 *   8  b_down  input  T  [experts, d]
 * with residual=yes: x, ids, weights, w_gate, w_up, w_down, residual, y
 *   6  residual  input  T  [m, d]
 * with weights=int4: x, ids, weights, w_gate, w_up, w_down, w_gate_scale, w_up_scale,
 *   w_down_scale, y
 *   3  w_gate        input  u8  [ceil(experts * h / 16) * ceil(d / 64) + 1, 512]
 *   4  w_up          input  u8  [ceil(experts * h / 16) * ceil(d / 64) + 1, 512]
 *   5  w_down        input  u8  [ceil(d * experts / 16) * ceil(h / 64) + 1, 512]
 *   6  w_gate_scale  input  T   [ceil(experts * h / 16), ceil(d / 128), 16]
 *   7  w_up_scale    input  T   [ceil(experts * h / 16), ceil(d / 128), 16]
 *   8  w_down_scale  input  T   [ceil(d * experts / 16), ceil(h / 128), 16]
 * with weights=mxfp4: x, ids, weights, w_gate, w_up, w_down, w_gate_scale, w_up_scale,
 *   w_down_scale, y
 *   3  w_gate        input  u8  [ceil(experts * h / 16) * ceil(d / 64) + 1, 512]
 *   4  w_up          input  u8  [ceil(experts * h / 16) * ceil(d / 64) + 1, 512]
 *   5  w_down        input  u8  [ceil(d * experts / 16) * ceil(h / 64) + 1, 512]
 *   6  w_gate_scale  input  u8  [ceil(experts * h / 16), ceil(d / 32), 16]
 *   7  w_up_scale    input  u8  [ceil(experts * h / 16), ceil(d / 32), 16]
 *   8  w_down_scale  input  u8  [ceil(d * experts / 16), ceil(h / 32), 16]
 * with weights=fp8: x, ids, weights, w_gate, w_up, w_down, w_gate_scale, w_up_scale,
 *   w_down_scale, y
 *   3  w_gate        input  u8   [2 * ceil(experts * h / 16) * ceil(d / 64) + 1, 512]
 *   4  w_up          input  u8   [2 * ceil(experts * h / 16) * ceil(d / 64) + 1, 512]
 *   5  w_down        input  u8   [2 * ceil(d * experts / 16) * ceil(h / 64) + 1, 512]
 *   6  w_gate_scale  input  f32  [ceil(experts * h / 16), ceil(d / 128), 16]
 *   7  w_up_scale    input  f32  [ceil(experts * h / 16), ceil(d / 128), 16]
 *   8  w_down_scale  input  f32  [ceil(d * experts / 16), ceil(h / 128), 16]
 * with weights=int8: x, ids, weights, w_gate, w_up, w_down, w_gate_scale, w_up_scale,
 *   w_down_scale, y
 *   3  w_gate        input  u8   [2 * ceil(experts * h / 16) * ceil(d / 64) + 1, 512]
 *   4  w_up          input  u8   [2 * ceil(experts * h / 16) * ceil(d / 64) + 1, 512]
 *   5  w_down        input  u8   [2 * ceil(d * experts / 16) * ceil(h / 64) + 1, 512]
 *   6  w_gate_scale  input  f32  [ceil(experts * h / 16), ceil(d / 128), 16]
 *   7  w_up_scale    input  f32  [ceil(experts * h / 16), ceil(d / 128), 16]
 *   8  w_down_scale  input  f32  [ceil(d * experts / 16), ceil(h / 128), 16]
 * with weights=nvfp4: x, ids, weights, w_gate, w_up, w_down, w_gate_scale, w_up_scale,
 *   w_down_scale, y
 *   3  w_gate        input  u8  [ceil(experts * h / 16) * ceil(d / 64) + 1, 512]
 *   4  w_up          input  u8  [ceil(experts * h / 16) * ceil(d / 64) + 1, 512]
 *   5  w_down        input  u8  [ceil(d * experts / 16) * ceil(h / 64) + 1, 512]
 *   6  w_gate_scale  input  u8  [ceil(experts * h / 16), ceil(d / 32) + 2, 32]
 *   7  w_up_scale    input  u8  [ceil(experts * h / 16), ceil(d / 32) + 2, 32]
 *   8  w_down_scale  input  u8  [ceil(d * experts / 16), ceil(h / 32) + 2, 32]
 * with quantise=token: x, ids, weights, w_gate, w_up, w_down, w_gate_scale, w_up_scale,
 *   w_down_scale, y
 *   3  w_gate        input  fp8  [experts, h, d]
 *   4  w_up          input  fp8  [experts, h, d]
 *   5  w_down        input  fp8  [experts, d, h]
 *   6  w_gate_scale  input  f32  [experts, h]
 *   7  w_up_scale    input  f32  [experts, h]
 *   8  w_down_scale  input  f32  [experts, d]
 * with quantise=block: x, ids, weights, w_gate, w_up, w_down, w_gate_scale, w_up_scale,
 *   w_down_scale, y
 *   3  w_gate        input  fp8  [experts, h, d]
 *   4  w_up          input  fp8  [experts, h, d]
 *   5  w_down        input  fp8  [experts, d, h]
 *   6  w_gate_scale  input  f32  [experts, ceil(h / 128), ceil(d / 128)]
 *   7  w_up_scale    input  f32  [experts, ceil(h / 128), ceil(d / 128)]
 *   8  w_down_scale  input  f32  [experts, ceil(d / 128), ceil(h / 128)]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0   dy         input   T    [m, d]
 *   1   x          input   T    [m, d], kept
 *   2   ids        input   i32  [m, top-k], kept
 *   3   weights    input   f32  [m, top-k], kept
 *   4   gate       input   T    [m * top-k, h], kept
 *   5   up         input   T    [m * top-k, h], kept
 *   6   w_gate     input   T    [experts, h, d]
 *   7   w_up       input   T    [experts, h, d]
 *   8   w_down     input   T    [experts, d, h]
 *   9   dx         output  T    [m, d]
 *   10  d_weights  output  f32  [m, top-k]
 *   11  dw_gate    output  T    [experts, h, d]
 *   12  dw_up      output  T    [experts, h, d]
 *   13  dw_down    output  T    [experts, d, h]
 * with shared: dy, x, ids, weights, gate, up, w_gate, w_up, w_down, dx, d_weights, dw_gate,
 *   dw_up, dw_down
 *   4   gate     input   T  [m * (shared + top-k), h], kept
 *   5   up       input   T  [m * (shared + top-k), h], kept
 *   6   w_gate   input   T  [experts + shared, h, d]
 *   7   w_up     input   T  [experts + shared, h, d]
 *   8   w_down   input   T  [experts + shared, d, h]
 *   11  dw_gate  output  T  [experts + shared, h, d]
 *   12  dw_up    output  T  [experts + shared, h, d]
 *   13  dw_down  output  T  [experts + shared, d, h]
 * with own-experts: dy, x, ids, first_expert, weights, gate, up, w_gate, w_up, w_down, dx,
 *   d_weights, dw_gate, dw_up, dw_down
 *   3   first_expert  input   i32  [1], kept
 *   7   w_gate        input   T    [own-experts, h, d]
 *   8   w_up          input   T    [own-experts, h, d]
 *   9   w_down        input   T    [own-experts, d, h]
 *   12  dw_gate       output  T    [own-experts, h, d]
 *   13  dw_up         output  T    [own-experts, h, d]
 *   14  dw_down       output  T    [own-experts, d, h]
 * with save=input: dy, x, ids, weights, w_gate, w_up, w_down, dx, d_weights, dw_gate, dw_up,
 *   dw_down
 * with gate-up=halves: dy, x, ids, weights, gate, up, w_gate_up, w_down, dx, d_weights,
 *   dw_gate_up, dw_down
 *   6   w_gate_up   input   T  [experts, 2 * h, d]
 *   10  dw_gate_up  output  T  [experts, 2 * h, d]
 * with gate-up=interleaved: dy, x, ids, weights, gate, up, w_gate_up, w_down, dx, d_weights,
 *   dw_gate_up, dw_down
 *   6   w_gate_up   input   T  [experts, 2 * h, d]
 *   10  dw_gate_up  output  T  [experts, 2 * h, d]
 * with bias=all: dy, x, ids, weights, gate, up, w_gate, w_up, w_down, b_down, dx, d_weights,
 *   dw_gate, dw_up, dw_down, db_gate, db_up, db_down
 *   9   b_down   input   T  [experts, d]
 *   15  db_gate  output  T  [experts, h]
 *   16  db_up    output  T  [experts, h]
 *   17  db_down  output  T  [experts, d]
 * with accumulate=yes: dy, x, ids, weights, gate, up, w_gate, w_up, w_down, dw_gate_before,
 *   dw_up_before, dw_down_before, dx, d_weights, dw_gate, dw_up, dw_down
 *   9   dw_gate_before  input  T  [experts, h, d]
 *   10  dw_up_before    input  T  [experts, h, d]
 *   11  dw_down_before  input  T  [experts, d, h]
 * with frozen=yes: dy, ids, weights, gate, up, w_gate, w_up, w_down, dx, d_weights */

/* moe-route: router of a mixture of experts: ids and weights of the top-k of softmax or sigmoid
 *   of the logits
 *
 *   m            1 to 2147483647                 tokens (any number)
 *   top-k        1 to 32                         experts that a token chooses
 *   experts      1 to 1024                       experts to choose from
 *   groups       1 to 32, rare                   groups of experts: a token uses the best ones;
 *                                                none if left out
 *   top-groups   1 to 32, rare                   groups that a token uses; all if left out
 *   score        softmax, sigmoid                function of a logit that gives an expert's score
 *   order        before, after                   whether the softmax is over all experts, before
 *                                                the choice, or over the chosen ones after it
 *   group-score  max, top2                       pass fwd: score of a group: its best expert, or
 *                                                the sum of its best two
 *   bias         no, yes                         pass fwd: whether a bias is added to the scores
 *                                                for the choice alone
 *   renormalise  no, yes                         whether the weights of a token add up to scale
 *   sum-eps      usual, 1e-06                    what renormalise=yes adds to the sum of a token's
 *                                                scores; usual: 1e-20 with score=sigmoid, and
 *                                                nothing with softmax
 *   scale        a number from 1e-06 to 1000000  a factor of the weights
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  logits   input   T    [m, experts]
 *   1  ids      output  i32  [m, top-k]
 *   2  weights  output  f32  [m, top-k]
 * with bias=yes: logits, bias, ids, weights
 *   1  bias  input  f32  [experts]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  d_weights  input   f32  [m, top-k]
 *   1  logits     input   T    [m, experts], kept
 *   2  ids        input   i32  [m, top-k], kept
 *   3  d_logits   output  T    [m, experts] */

/* qkv: queries, keys and values of attention: x w^T (+ bias, head norms, RoPE, into a cache)
 *
 *   m                1 to 2147483647                   tokens (any number)
 *   d                1 to 2147483647                   features of a token
 *   heads            1 to 1024                         heads of q
 *   dim              1 to 512                          features of a head
 *   kv-heads         1 to 1024, rare                   heads of k, and of v; heads if left out
 *   rotary           1 to 512, rare                    features of a head to rotate, an even
 *                                                      number; all if left out
 *   positions        1 to 2147483647, rare             rows of the table of angles; 4096 if left
 *                                                      out
 *   cache-slots      1 to 2147483647, rare             rows of the caches; m if left out
 *   cache-head       1 to 1048576, rare                elements from a head of the caches to the
 *                                                      next one, a multiple of dim; dim if left out
 *   weights                                            separate, packed, grouped, int4, mxfp4, fp8,
 *                                                      int8, nvfp4: weights and biases of q, k and
 *                                                      v: separate, or all rows in one, dense
 *                                                      (packed) or in a packed format; grouped: for
 *                                                      each head of k its heads of q, then k, then
 *                                                      v
 *   gates            no, yes                           whether w_q has, behind the rows of each
 *                                                      head, as many of its gate, whose products
 *                                                      are written as they are
 *   keys             yes, no                           whether there are k and v, or q alone, of
 *                                                      weights=separate
 *   bias             no, yes                           whether q, k and v have a bias
 *   norm             no, yes, rows, layer              norms of q and k; yes: RMSNorm of each head;
 *                                                      rows: RMSNorm over all heads; layer: layer
 *                                                      normalisation of each head
 *   norm-order       before, after                     whether heads are normalised before RoPE or
 *                                                      after it
 *   v-norm           no, yes                           whether each head of v has an RMSNorm,
 *                                                      without weights
 *   convention       llama, gemma                      weights of the norm: factors, or (gemma)
 *                                                      kept as their distance from 1
 *   eps              a number from 0 to 1              added to the norm's mean square
 *   rotation         none, halves, interleaved         RoPE of q and k: none, pairs rotary/2 apart,
 *                                                      or neighbours
 *   cache            no, yes                           whether k and v are written to rows of
 *                                                      caches, by slots: nowhere by one of no row
 *   slots            i32, i64                          element type of the slots
 *   batch-invariant  no, yes                           pass fwd: whether the bits of a row are the
 *                                                      same whatever other rows there are
 *   cache-format     same, e4m3                        element type of cached keys and values: that
 *                                                      of q, or e4m3 with f32 scales
 *   cache-scales     tensor, head                      scales of keys and of values in e4m3: one
 *                                                      for the tensor, or each head's own
 *   angles           table, base, llama3, yarn         a table is given, or the rule by which
 *                                                      frequencies are computed
 *   base             a number from 1 to 1000000000000  base of the computed frequencies
 *   factor           a number from 0.001 to 1000000    factor by which the rule stretches positions
 *   context          a number from 1 to 1000000000     positions that the model was trained with
 *   low              a number from 0.001 to 1000000    llama3: context/low is the longest
 *                                                      wavelength that is interpolated
 *   high             a number from 0.001 to 1000000    llama3: context/high is the longest
 *                                                      wavelength that is left alone
 *   beta-fast        a number from 0.001 to 1000000    yarn: rotations in the context from which a
 *                                                      pair is left alone
 *   beta-slow        a number from 0.001 to 1000000    yarn: rotations in the context up to which a
 *                                                      pair is stretched
 *   scale            a number from 0 to 1000000        factor of all sines and cosines; 0: the
 *                                                      rule's own
 *   group            128, 64, 32, row                  pass fwd: weights=int4, fp8 or int8:
 *                                                      elements of a row of the weight that share a
 *                                                      scale
 *   zeros            no, yes                           pass fwd: weights=int4: whether each group
 *                                                      has a zero point, instead of 8
 *   quantise         no, token, block                  pass fwd: whether tokens are quantised to
 *                                                      e4m3, for weights of e4m3: with a scale for
 *                                                      each token and row of a weight, or each 128
 *                                                      elements and block of 128 x 128
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x    input   T  [m, d]
 *   1  w_q  input   T  [dim * heads, d]
 *   2  w_k  input   T  [dim * heads, d]
 *   3  w_v  input   T  [dim * heads, d]
 *   4  q    output  T  [m, heads, dim]
 *   5  k    output  T  [m, heads, dim]
 *   6  v    output  T  [m, heads, dim]
 * with kv-heads: x, w_q, w_k, w_v, q, k, v
 *   2  w_k  input   T  [dim * kv-heads, d]
 *   3  w_v  input   T  [dim * kv-heads, d]
 *   5  k    output  T  [m, kv-heads, dim]
 *   6  v    output  T  [m, kv-heads, dim]
 * with weights=packed: x, w, q, k, v
 *   1  w  input  T  [3 * dim * heads, d]
 * with weights=grouped: x, w, q, k, v
 *   1  w  input  T  [3 * dim * heads, d]
 * with weights=int4: x, w, w_scale, q, k, v
 *   1  w        input  u8  [ceil(3 * dim * heads / 16) * ceil(d / 64) + 1, 512]
 *   2  w_scale  input  T   [ceil(3 * dim * heads / 16), ceil(d / 128), 16]
 * with weights=mxfp4: x, w, w_scale, q, k, v
 *   1  w        input  u8  [ceil(3 * dim * heads / 16) * ceil(d / 64) + 1, 512]
 *   2  w_scale  input  u8  [ceil(3 * dim * heads / 16), ceil(d / 32), 16]
 * with weights=fp8: x, w, w_scale, q, k, v
 *   1  w        input  u8   [2 * ceil(3 * dim * heads / 16) * ceil(d / 64) + 1, 512]
 *   2  w_scale  input  f32  [ceil(3 * dim * heads / 16), ceil(d / 128), 16]
 * with weights=int8: x, w, w_scale, q, k, v
 *   1  w        input  u8   [2 * ceil(3 * dim * heads / 16) * ceil(d / 64) + 1, 512]
 *   2  w_scale  input  f32  [ceil(3 * dim * heads / 16), ceil(d / 128), 16]
 * with weights=nvfp4: x, w, w_scale, q, k, v
 *   1  w        input  u8  [ceil(3 * dim * heads / 16) * ceil(d / 64) + 1, 512]
 *   2  w_scale  input  u8  [ceil(3 * dim * heads / 16), ceil(d / 32) + 2, 32]
 * with gates=yes: x, w_q, w_k, w_v, q, k, v, gates
 *   1  w_q    input   T  [2 * dim * heads, d]
 *   7  gates  output  T  [m, heads, dim]
 * with keys=no: x, w_q, q
 * with bias=yes: x, w_q, w_k, w_v, b_q, b_k, b_v, q, k, v
 *   4  b_q  input  T  [dim * heads]
 *   5  b_k  input  T  [dim * heads]
 *   6  b_v  input  T  [dim * heads]
 * with norm=yes: x, w_q, w_k, w_v, q_norm, k_norm, q, k, v
 *   4  q_norm  input  T  [dim]
 *   5  k_norm  input  T  [dim]
 * with norm=rows: x, w_q, w_k, w_v, q_norm, k_norm, q, k, v
 *   4  q_norm  input  T  [dim * heads]
 *   5  k_norm  input  T  [dim * heads]
 * with rotation=halves: x, w_q, w_k, w_v, positions, angles, q, k, v
 *   4  positions  input  i32  [m]
 *   5  angles     input  f32  [4096, dim]
 * with rotation=interleaved: x, w_q, w_k, w_v, positions, angles, q, k, v
 *   4  positions  input  i32  [m]
 *   5  angles     input  f32  [4096, dim]
 * with cache=yes: x, w_q, w_k, w_v, k_cache, v_cache, slots, q
 *   4  k_cache  updated  T    [m, heads, dim]
 *   5  v_cache  updated  T    [m, heads, dim]
 *   6  slots    input    i32  [m]
 * with quantise=token: x, w, w_scale, q, k, v
 *   1  w        input  fp8  [3 * dim * heads, d]
 *   2  w_scale  input  f32  [3 * dim * heads]
 * with quantise=block: x, w, w_scale, q, k, v
 *   1  w        input  fp8  [3 * dim * heads, d]
 *   2  w_scale  input  f32  [ceil(3 * dim * heads / 128), ceil(d / 128)] */

/* attention: attention: out = softmax(scale * q k^T + mask) v, without scores in memory
 *
 *   s                1 to 16777216               queries of a sequence; in layout thd of all
 *                                                sequences together (any number)
 *   b                1 to 65536                  sequences
 *   heads            1 to 1024                   heads of q
 *   dim              1 to 512                    features of a head, an even number
 *   v-dim            1 to 512, rare              features of a head of v, an even number, if they
 *                                                are not as many as those of q and k
 *   kv               1 to 16777216, rare         keys of a sequence, in layout thd of all sequences
 *                                                together, with pages the most of a sequence; s if
 *                                                left out
 *   kv-heads         1 to 1024, rare             heads of k and v, which divide those of q; heads
 *                                                if left out
 *   window           1 to 16777216, rare         keys to the left that a query sees, itself
 *                                                included; all if left out
 *   page             1 to 256, rare              keys of a page of k and v, a power of two from 16
 *                                                to 256; a page id out of range reads zeros;
 *                                                contiguous if left out
 *   pages            1 to 16777216, rare         pages in memory; as many as the sequences need if
 *                                                left out. With fewer and lengths=yes, test data
 *                                                have shorter sequences
 *   q-row            1 to 17179869184, rare      stride of q between tokens, in elements, for a
 *                                                part of a packed row; heads * dim if left out
 *   k-row            1 to 17179869184, rare      as q-row, for k; kv-heads * kv-head if left out
 *   v-row            1 to 17179869184, rare      as q-row, for v; kv-heads * kv-head, or kv-heads *
 *                                                v-dim, if left out
 *   kv-head          1 to 17179869184, rare      stride of k and of v between heads, in elements, a
 *                                                multiple of dim; dim if left out
 *   mask             none, causal, bool, packed  keys that a query may see: all, those up to its
 *                                                position, or by a mask of bytes or of bits
 *   layout           bshd, thd                   order of q, k and v: [b, s, heads, dim], or packed
 *                                                sequences
 *   mask-heads       one, each                   masks of a sequence: one, or each head's own
 *   mask-data                                    random, documents, causal-documents, upper, all,
 *                                                none: distribution of the mask in tests and
 *                                                measurements
 *   bias             no, yes                     whether a matrix is added to the scores
 *   bias-heads       each, one                   biases of a sequence: each head's own, or one
 *   bias-sequences   one, each                   biases: one for all sequences, or each one's own
 *   lengths          no, yes                     whether each sequence has its own number of keys,
 *                                                of kv at most
 *   sinks            no, yes                     whether each head has a logit that joins the
 *                                                softmax without a value
 *   lse              no, yes                     pass fwd: whether the log of the sum of
 *                                                exponentials is written for a backward pass
 *   batch-invariant  no, yes                     pass fwd: whether the bits of a row are the same
 *                                                whatever other rows there are
 *   deterministic    no, yes                     pass bwd: whether every run gives the same bits
 *   softcap          a number from 0 to 1000000  scores become softcap * tanh(score / softcap); 0:
 *                                                they stay
 *   scale            a number from 0 to 1000000  factor of the scores; 0: 1 / sqrt(dim)
 *   cache-format     same, e4m3                  pass fwd: element type of cached keys and values:
 *                                                that of q, or e4m3 with f32 scales
 *   cache-scales     tensor, head                pass fwd: scales of keys and of values in e4m3:
 *                                                one for the tensor, or each head's own
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  q    input   T  [b, s, heads, dim]
 *   1  k    input   T  [b, s, heads, dim]
 *   2  v    input   T  [b, s, heads, dim]
 *   3  out  output  T  [b, s, heads, dim]
 * with v-dim: q, k, v, out
 *   2  v    input   T  [b, s, heads, v-dim]
 *   3  out  output  T  [b, s, heads, v-dim]
 * with kv: q, k, v, out
 *   1  k  input  T  [b, kv, heads, dim]
 *   2  v  input  T  [b, kv, heads, dim]
 * with kv-heads: q, k, v, out
 *   1  k  input  T  [b, s, kv-heads, dim]
 *   2  v  input  T  [b, s, kv-heads, dim]
 * with page: q, k, v, pages, out
 *   1  k      input  T    [b * ceil(s / page), page, heads, dim]
 *   2  v      input  T    [b * ceil(s / page), page, heads, dim]
 *   3  pages  input  i32  [b, ceil(s / page)]
 * with q-row: q, k, v, out
 *   0  q  input  T  [b, s, q-row]
 * with k-row: q, k, v, out
 *   1  k  input  T  [b, s, k-row]
 * with v-row: q, k, v, out
 *   2  v  input  T  [b, s, v-row]
 * with kv-head: q, k, v, out
 *   1  k  input  T  [b, s, heads, kv-head]
 *   2  v  input  T  [b, s, heads, kv-head]
 * with mask=bool: q, k, v, mask, out
 *   3  mask  input  u8  [b, 1, s, s]
 * with mask=packed: q, k, v, mask_bits, mask_flags, out
 *   3  mask_bits   input  i32  [b, 1, s, 4 * ceil(s / 128)]
 *   4  mask_flags  input  u8   [b, 1, ceil(s / 64), ceil(s / 64)]
 * with layout=thd: q, k, v, offsets, out
 *   0  q        input   T    [s, heads, dim]
 *   1  k        input   T    [s, heads, dim]
 *   2  v        input   T    [s, heads, dim]
 *   3  offsets  input   i32  [b + 1]
 *   4  out      output  T    [s, heads, dim]
 * with bias=yes: q, k, v, bias, out
 *   3  bias  input  T  [1, heads, s, s]
 * with lengths=yes: q, k, v, lengths, out
 *   3  lengths  input  i32  [b]
 * with sinks=yes: q, k, v, sinks, out
 *   3  sinks  input  f32  [heads]
 * with lse=yes: q, k, v, out, lse
 *   4  lse  output  f32  [b, heads, s]
 * with cache-format=e4m3: q, k, v, k_scale, v_scale, out
 *   1  k        input  fp8  [b, s, heads, dim]
 *   2  v        input  fp8  [b, s, heads, dim]
 *   3  k_scale  input  f32  [1]
 *   4  v_scale  input  f32  [1]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  d_out  input   T    [b, s, heads, dim]
 *   1  q      input   T    [b, s, heads, dim]
 *   2  k      input   T    [b, s, heads, dim]
 *   3  v      input   T    [b, s, heads, dim]
 *   4  out    input   T    [b, s, heads, dim], kept
 *   5  lse    input   f32  [b, heads, s], kept
 *   6  dq     output  T    [b, s, heads, dim], any order
 *   7  dk     output  T    [b, s, heads, dim]
 *   8  dv     output  T    [b, s, heads, dim]
 * with v-dim: d_out, q, k, v, out, lse, dq, dk, dv
 *   0  d_out  input   T  [b, s, heads, v-dim]
 *   3  v      input   T  [b, s, heads, v-dim]
 *   4  out    input   T  [b, s, heads, v-dim], kept
 *   8  dv     output  T  [b, s, heads, v-dim]
 * with kv: d_out, q, k, v, out, lse, dq, dk, dv
 *   2  k   input   T  [b, kv, heads, dim]
 *   3  v   input   T  [b, kv, heads, dim]
 *   7  dk  output  T  [b, kv, heads, dim]
 *   8  dv  output  T  [b, kv, heads, dim]
 * with kv-heads: d_out, q, k, v, out, lse, dq, dk, dv
 *   2  k   input   T  [b, s, kv-heads, dim]
 *   3  v   input   T  [b, s, kv-heads, dim]
 *   7  dk  output  T  [b, s, kv-heads, dim]
 *   8  dv  output  T  [b, s, kv-heads, dim]
 * with page: d_out, q, k, v, out, lse, pages, dq, dk, dv
 *   2  k      input   T    [b * ceil(s / page), page, heads, dim]
 *   3  v      input   T    [b * ceil(s / page), page, heads, dim]
 *   6  pages  input   i32  [b, ceil(s / page)]
 *   8  dk     output  T    [b * ceil(s / page), page, heads, dim]
 *   9  dv     output  T    [b * ceil(s / page), page, heads, dim]
 * with q-row: d_out, q, k, v, out, lse, dq, dk, dv
 *   1  q  input  T  [b, s, q-row]
 * with k-row: d_out, q, k, v, out, lse, dq, dk, dv
 *   2  k  input  T  [b, s, k-row]
 * with v-row: d_out, q, k, v, out, lse, dq, dk, dv
 *   3  v  input  T  [b, s, v-row]
 * with kv-head: d_out, q, k, v, out, lse, dq, dk, dv
 *   2  k  input  T  [b, s, heads, kv-head]
 *   3  v  input  T  [b, s, heads, kv-head]
 * with mask=bool: d_out, q, k, v, out, lse, mask, dq, dk, dv
 *   6  mask  input  u8  [b, 1, s, s]
 * with mask=packed: d_out, q, k, v, out, lse, mask_bits, mask_flags, dq, dk, dv
 *   6  mask_bits   input  i32  [b, 1, s, 4 * ceil(s / 128)]
 *   7  mask_flags  input  u8   [b, 1, ceil(s / 64), ceil(s / 64)]
 * with layout=thd: d_out, q, k, v, out, lse, offsets, dq, dk, dv
 *   0  d_out    input   T    [s, heads, dim]
 *   1  q        input   T    [s, heads, dim]
 *   2  k        input   T    [s, heads, dim]
 *   3  v        input   T    [s, heads, dim]
 *   4  out      input   T    [s, heads, dim], kept
 *   5  lse      input   f32  [heads, s], kept
 *   6  offsets  input   i32  [b + 1]
 *   7  dq       output  T    [s, heads, dim], any order
 *   8  dk       output  T    [s, heads, dim]
 *   9  dv       output  T    [s, heads, dim]
 * with bias=yes: d_out, q, k, v, out, lse, bias, dq, dk, dv
 *   6  bias  input  T  [1, heads, s, s]
 * with lengths=yes: d_out, q, k, v, out, lse, lengths, dq, dk, dv
 *   6  lengths  input  i32  [b]
 * with sinks=yes: d_out, q, k, v, out, lse, sinks, dq, dk, dv, d_sinks
 *   6   sinks    input   f32  [heads]
 *   10  d_sinks  output  f32  [heads] */

/* pack-mask: a mask of bytes as bits, with flags of its tiles, for attention
 *
 *   s          1 to 16777216        queries of a sequence (any number)
 *   b          1 to 65536           sequences
 *   kv         1 to 16777216, rare  keys of a sequence; s if left out
 *   heads      1 to 1024, rare      masks of a sequence; 1 if left out
 *   mask-data                       random, documents, causal-documents, upper, all, none:
 *                                   distribution of the mask in tests and measurements
 *
 * Pass fwd: dtype bf16 on CUDA; f32 on the CPU
 *   0  mask        input   u8   [b, 1, s, s]
 *   1  mask_bits   output  i32  [b, 1, s, 4 * ceil(s / 128)]
 *   2  mask_flags  output  u8   [b, 1, ceil(s / 64), ceil(s / 64)]
 * with kv: mask, mask_bits, mask_flags
 *   0  mask        input   u8   [b, 1, s, kv]
 *   1  mask_bits   output  i32  [b, 1, s, 4 * ceil(kv / 128)]
 *   2  mask_flags  output  u8   [b, 1, ceil(s / 64), ceil(kv / 64)]
 * with heads: mask, mask_bits, mask_flags
 *   0  mask        input   u8   [b, heads, s, s]
 *   1  mask_bits   output  i32  [b, heads, s, 4 * ceil(s / 128)]
 *   2  mask_flags  output  u8   [b, heads, ceil(s / 64), ceil(s / 64)] */

/* masked-softmax: y = softmax(scale * x) over the last axis, of the columns that a mask allows
 *
 *   s           1 to 16777216               rows of a matrix: queries (any number)
 *   b           1 to 65536                  sequences
 *   heads       1 to 65536                  matrices of a sequence
 *   n           1 to 16777216, rare         columns: keys; s if left out
 *   mask        none, causal, bool          pass fwd: columns that a row may see: all, those up to
 *                                           its position, or by bytes
 *   mask        none, causal                pass bwd: columns that a row saw: all, or those up to
 *                                           its position; where another mask allowed none y is 0
 *   mask-heads  one, each                   pass fwd: masks of a sequence: one, or each head's own
 *   scale       a number from 0 to 1000000  factor of the scores
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x  input   T  [b, heads, s, s]
 *   1  y  output  T  [b, heads, s, s]
 * with n: x, y
 *   0  x  input   T  [b, heads, s, n]
 *   1  y  output  T  [b, heads, s, n]
 * with mask=bool: x, mask, y
 *   1  mask  input  u8  [b, 1, s, s]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  y   input   T  [b, heads, s, s], kept
 *   1  dy  input   T  [b, heads, s, s]
 *   2  dx  output  T  [b, heads, s, s]
 * with n: y, dy, dx
 *   0  y   input   T  [b, heads, s, n], kept
 *   1  dy  input   T  [b, heads, s, n]
 *   2  dx  output  T  [b, heads, s, n] */

/* layernorm: layer normalisation: y = (x - mean(x)) / sqrt(var(x) + eps) * w + b
 *
 *   m         1 to 2147483647       tokens (any number)
 *   d         1 to 65536            features of a token
 *   residual  no, yes               add a residual first, and write the sum too
 *   eps       a number from 0 to 1  added to the variance
 *   frozen    no, yes               pass bwd: whether w and b have no gradients
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x  input   T  [m, d]
 *   1  w  input   T  [d]
 *   2  b  input   T  [d]
 *   3  y  output  T  [m, d]
 * with residual=yes: x, residual, w, b, y, sum
 *   1  residual  input   T  [m, d]
 *   5  sum       output  T  [m, d]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x   input   T  [m, d]
 *   1  w   input   T  [d]
 *   2  dy  input   T  [m, d]
 *   3  dx  output  T  [m, d]
 *   4  dw  output  T  [d]
 *   5  db  output  T  [d]
 * with residual=yes: x, w, dy, dsum, dx, dw, db
 *   3  dsum  input  T  [m, d]
 * with frozen=yes: x, w, dy, dx */

/* layer: transformer layers: norm, qkv into the cache, attention over it, output product, norm,
 *   feed-forward network or mixture of experts
 *
 *   batch           1 to 65536                            sequences (any number)
 *   d               1 to 2147483647                       features of a token
 *   h               1 to 2147483647                       intermediate size of the feed-forward
 *                                                         network, or of an expert
 *   heads           1 to 1024                             heads of q; with mixer=conv heads and dim
 *                                                         make its channels
 *   dim             1 to 512                              features of a head
 *   cache           1 to 16777216                         keys that the cache has room for, of a
 *                                                         sequence; not of mixers with a state
 *   kv-heads        1 to 1024, rare                       heads of k, and of v; heads if left out
 *   s               1 to 16777216, rare                   new tokens of each sequence; 1 if left
 *                                                         out
 *   layers          1 to 256, rare                        number of layers, each with its own
 *                                                         weights and caches
 *   experts         1 to 1024, rare                       experts to choose from, with ffn=moe
 *   top-k           1 to 32, rare                         experts that a token chooses
 *   width           1 to 8, rare                          taps of a mixer's convolution, 2 to 8
 *   nope            1 to 512, rare                        mixer=mla: features of a head of q that
 *                                                         are not rotated
 *   rope            1 to 256, rare                        mixer=mla: those that are, and features
 *                                                         of the rotated key
 *   v-dim           1 to 512, rare                        mixer=mla, gated-delta-rule and kda:
 *                                                         features of a head's values
 *   rank            1 to 1024, rare                       mixer=mla: features of the latent of keys
 *                                                         and values
 *   q-rank          1 to 16777216, rare                   mixer=mla: those of the queries' latent;
 *                                                         none if left out
 *   v-heads         1 to 1024, rare                       mixer=gated-delta-rule and kda: heads of
 *                                                         v, a multiple of heads; as many if left
 *                                                         out
 *   gate-rank       1 to 16777216, rare                   mixer=kda: features between two products
 *                                                         to the decays, and to the gates of the
 *                                                         output; one product each if left out
 *   states          1 to 16777216, rare                   entries of the caches of states; batch if
 *                                                         left out
 *   state-block     1 to 17179869184, rare                elements from an entry of the cache of
 *                                                         states of heads to the next, for a part
 *                                                         of a page; contiguous if left out
 *   conv-block      1 to 17179869184, rare                as state-block, for states of a
 *                                                         convolution
 *   conv-entries    1 to 24, rare                         inputs that a convolution's state holds,
 *                                                         width - 1 or more; width if left out
 *   state-dim       1 to 256, rare                        mixer=ssd: features of a group of B and C
 *   state-groups    1 to 1024, rare                       mixer=ssd: groups of heads that share B
 *                                                         and C, and have a norm
 *   ssm-heads       1 to 1024, rare                       mixer=attention-ssd: heads of ssd; heads
 *                                                         are those of attention
 *   ssm-dim         1 to 512, rare                        mixer=attention-ssd: features of a head
 *                                                         of ssd
 *   shared          1 to 8, rare                          experts that every token goes through;
 *                                                         left out: none
 *   own-experts     1 to 1024, rare                       experts in the weights, the slice of a
 *                                                         rank of a group: the tensor first_expert
 *                                                         says which; all if left out
 *   shared-h        1 to 16777216, rare                   intermediate size of a network with
 *                                                         weights of its own beside the experts,
 *                                                         for every token; left out: none
 *   input-h         1 to 16777216, rare                   features of an input of the layer's own
 *                                                         for each token, which a gate of its
 *                                                         output takes; left out: none
 *   groups          1 to 32, rare                         groups of experts: a token uses the best
 *                                                         ones; left out: none
 *   top-groups      1 to 32, rare                         groups that a token uses; all if left out
 *   window          1 to 1073741824, rare                 keys of a query at most, the nearest; all
 *                                                         if left out
 *   rotary          1 to 512, rare                        features of a head to rotate; all if left
 *                                                         out
 *   ranks           1 to 8, rare                          ranks of a group, each with its slice:
 *                                                         heads, kv-heads, h and shared-h are the
 *                                                         slice's; one GPU has all if left out
 *   page            1 to 256, rare                        keys of a page of the caches, 16 to 256,
 *                                                         a power of two; one that is not in memory
 *                                                         is zeros; contiguous if left out
 *   pages           1 to 67108864, rare                   pages of a layer's cache; what the
 *                                                         sequences take if left out
 *   kv-head         1 to 16777216, rare                   elements from a head of the caches to the
 *                                                         next one, a multiple of dim; dim if left
 *                                                         out
 *   positions       1 to 1073741824, rare                 rows of the table of angles; 4096 if left
 *                                                         out
 *   act                                                   silu, gelu, gelu-tanh, relu, none,
 *                                                         swiglu-oai, relu2: activation of the
 *                                                         feed-forward network; relu2: relu(x)² of
 *                                                         networks without gates, which experts
 *                                                         then have none of
 *   norm            rms, layer                            normalisation of rows: by the root mean
 *                                                         square, or layer normalisation with
 *                                                         biases
 *   post-norms      no, yes, only                         whether the results of attention and of
 *                                                         the feed-forward network are normalised
 *                                                         before they are added; only: their inputs
 *                                                         are not
 *   residual-scale  no, yes, each                         whether a vector multiplies what is added
 *                                                         to the residual; each: one of each
 *                                                         product; experts have route-scale
 *   gate-scale      no, yes                               whether a vector multiplies the gates of
 *                                                         the feed-forward network in front of
 *                                                         their activation
 *   expert-norms    no, yes                               whether the router, the experts and the
 *                                                         network of shared-h, which is beside
 *                                                         them, each have norms of their own
 *   expert-scale    no, yes                               whether the weight of a token's expert is
 *                                                         multiplied by a number of the expert
 *   layer-scalar    no, yes                               whether one number multiplies the layer's
 *                                                         output
 *   block           serial, parallel, parallel-norms      serial: the feed-forward network follows
 *                                                         attention; parallel: it takes the same
 *                                                         normalised x; parallel-norms: it takes x
 *                                                         by a second norm
 *   ffn             gated, plain, moe, none               the feed-forward network: with a gate,
 *                                                         plain without, a mixture of experts with
 *                                                         gates, or none in a layer that is its
 *                                                         mixer alone
 *   score           softmax, sigmoid                      function of a router's logit that gives
 *                                                         an expert's score
 *   order           before, after                         whether the router's softmax is over all
 *                                                         experts, before the choice, or over the
 *                                                         chosen ones after it
 *   renormalise     no, yes                               whether the weights of a token's experts
 *                                                         add up to 1
 *   sum-eps         usual, 1e-06                          added to the sum of a token's scores that
 *                                                         its weights are divided by, as in
 *                                                         moe-route
 *   group-score     max, top2                             score of a group of experts: its best
 *                                                         expert, or the sum of its best two
 *   choice-bias     no, yes                               whether a bias is added to the experts'
 *                                                         scores for the choice alone
 *   logits          same, f32                             element type of the router's logits: that
 *                                                         of x, or f32
 *   router-bias     no, yes                               whether the router's product has a bias
 *   route-scale     a number from 1e-06 to 1000000        a factor of the weights of a token's
 *                                                         experts
 *   shared-gate     no, yes                               whether the network of shared-h is
 *                                                         weighted by the sigmoid of a product of
 *                                                         its own
 *   gate-up         separate, halves, interleaved         the experts' weights of gate and up:
 *                                                         separate, or one w_gate_up; halves: rows
 *                                                         of gate, then of up; interleaved: they
 *                                                         alternate
 *   routing                                               uniform, or zipf:SKEW with a skew from 0
 *                                                         to 4, or file:IDS, a text file of ids:
 *                                                         distribution of the chosen experts, for
 *                                                         test data and the choice of a preset
 *   convention      llama, gemma, t5                      where the norms round, and whether
 *                                                         weights are kept as their distance from 1
 *   eps             a number from 0 to 1                  added to the norms' mean square
 *   qkv-bias        no, yes                               whether q, k and v have a bias
 *   qkv-weights     separate, packed, grouped             the weights of q, k and v: separate, or
 *                                                         one w_qkv; packed: all rows of q, then k,
 *                                                         then v; grouped: for each head of k its
 *                                                         heads of q, then k, then v; with
 *                                                         mixer=gated-delta-rule q, k, v and z in
 *                                                         w_qkvz, and b and a in w_ba
 *   qk-norm         no, yes, rows, layer                  norms of q and k; yes: RMSNorm of each
 *                                                         head; rows: RMSNorm over all heads;
 *                                                         layer: layer normalisation of each head
 *   qk-norm-order   before, after                         whether heads are normalised before RoPE
 *                                                         or after it
 *   v-norm          no, yes                               whether each head of v has an RMSNorm,
 *                                                         without weights
 *   keys            own, shared                           whether the layer has keys and values of
 *                                                         its own, or reads those of another one in
 *                                                         its caches
 *   query-scale     no, rows                              whether the queries of each token have a
 *                                                         factor
 *   sinks           no, yes                               whether each head has a logit that joins
 *                                                         attention's softmax without a value
 *   beta-scale      a number from 0 to 2                  factor of beta in mixer=gated-delta-rule
 *   gate-bound      a number from -100 to 0               mixer=kda: the decays' bound, which
 *                                                         sigmoids approach; 0: decays by softplus
 *   dt-min          a number from 0 to 1000000            mixer=ssd: the least step
 *   dt-max          a number from 0 to 1000000            mixer=ssd: the largest step; 0: no limit
 *   mixer-norm      gated, none                           mixer=ssd: the norm of what its gate has
 *                                                         multiplied, or none
 *   in-scale        no, yes                               mixer=ssd: whether a vector multiplies
 *                                                         the result of the product in front of it
 *   mixer-eps       a number from 0 to 1                  added to the mean square of a mixer's own
 *                                                         norm
 *   output-gate     no, features, heads, q-rows           sigmoids of a product of attention's
 *                                                         input that multiply its output: one for
 *                                                         each feature, or for each head; q-rows:
 *                                                         for each feature, and w_q has behind the
 *                                                         rows of each head those of its gates
 *   conv-bias       no, yes                               whether a mixer's convolution has a bias,
 *                                                         and with mixer=conv the product in front
 *                                                         of it
 *   conv-indices    no, yes                               whether state_indices find the states of
 *                                                         a mixer's convolutions too: a sequence
 *                                                         whose index is null-index keeps them
 *   conv-order      channels, entries                     order of a convolution's state:
 *                                                         [channels, entries] or [entries,
 *                                                         channels]
 *   state-layout    kv, vk                                mixer=gated-delta-rule and kda: states
 *                                                         [dim, v-dim] or [v-dim, dim]
 *   state-dtype     f32, bf16                             element type of states of heads
 *   null-index      -1, 0                                 the index of a sequence that is padding
 *                                                         and keeps its states: lower ones are
 *                                                         padding too
 *   out-bias        no, yes                               whether the output product has a bias
 *   ffn-bias        no, yes                               whether the feed-forward network has
 *                                                         biases
 *   rotation        halves, interleaved, none             RoPE of q and k: pairs rotary/2 apart,
 *                                                         neighbours, or none
 *   rope-order      same, halves                          mixer=mla: order of rotated neighbours,
 *                                                         as in mla-rope
 *   latent-eps      a number from 0 to 1                  mixer=mla: added to the mean square of
 *                                                         the latents' norms
 *   softcap         a number from 0 to 1000000            soft cap c of attention's scores, c
 *                                                         tanh(x / c); 0: none
 *   scale           a number from 0 to 1000000            scale of attention's scores; 0: 1 /
 *                                                         sqrt(dim), or 1 / sqrt(nope + rope)
 *   link            loopback, peers, nccl                 how ranks sum; peers: through a group's
 *                                                         memory; nccl: by NCCL; loopback: one rank
 *                                                         plays all, with equal summands
 *   lengths         full, ragged                          keys of the sequences in tests and
 *                                                         measurements: as many as the cache has
 *                                                         room for, or fewer
 *   angles          base, table, llama3, yarn             a table is given, or the rule by which
 *                                                         frequencies are computed
 *   base            a number from 1 to 1000000000000      base of the computed frequencies
 *   factor          a number from 0.001 to 1000000        factor by which the rule stretches
 *                                                         positions
 *   context         a number from 1 to 1000000000         positions that the model was trained with
 *   low             a number from 0.001 to 1000000        llama3: context/low is the longest
 *                                                         wavelength that is interpolated
 *   high            a number from 0.001 to 1000000        llama3: context/high is the longest
 *                                                         wavelength that is left alone
 *   beta-fast       a number from 0.001 to 1000000        yarn: rotations in the context from which
 *                                                         a pair is left alone
 *   beta-slow       a number from 0.001 to 1000000        yarn: rotations in the context up to
 *                                                         which a pair is stretched
 *   rope-scale      a number from 0 to 1000000            factor of all sines and cosines; 0: the
 *                                                         rule's own
 *   weights         dense, int4, mxfp4, fp8, int8, nvfp4  pass fwd: format of w_qkv, the output
 *                                                         product and the gated network or experts:
 *                                                         dense, or packed as linear has it
 *   group           128, 64, 32, row                      pass fwd: weights=int4, fp8 or int8:
 *                                                         elements of a row of the weight that
 *                                                         share a scale
 *   zeros           no, yes                               pass fwd: weights=int4: whether each
 *                                                         group has a zero point, instead of 8
 *   attn-weights    same, dense                           with packed weights or quantise:
 *                                                         attention's weights have the network's
 *                                                         format, or are dense, as in gpt-oss
 *   quantise        no, token, block                      pass fwd: whether tokens are quantised to
 *                                                         e4m3, for weights of e4m3: with a scale
 *                                                         for each token and row of a weight, or
 *                                                         each 128 elements and block of 128 x 128
 *   mixer                                                 attention, conv, mla, gated-delta-rule,
 *                                                         kda, ssd, attention-ssd, none: what mixes
 *                                                         the tokens: attention, attention over a
 *                                                         cache of keys and values; conv, a short
 *                                                         convolution with gates in front of it and
 *                                                         behind it, as in LFM2; mla, latent
 *                                                         attention in the absorbed form, over a
 *                                                         cache of latents; gated-delta-rule,
 *                                                         linear attention by the gated delta rule
 *                                                         behind short convolutions; kda, Kimi
 *                                                         Delta Attention, the gated delta rule
 *                                                         with a decay of each feature; ssd, state
 *                                                         space duality behind short convolutions,
 *                                                         as in Mamba-2; attention-ssd, attention
 *                                                         and ssd on the same input, as in
 *                                                         Falcon-H1; none, for layers that are a
 *                                                         feed-forward network alone
 *   cache-format    same, e4m3                            element type of cached keys and values:
 *                                                         that of q, or e4m3 with f32 scales
 *   cache-scales    tensor, head                          scales of keys and of values in e4m3: one
 *                                                         for the tensor, or each head's own
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0   x               input    T    [batch, d]
 *   1   positions       input    i32  [batch]
 *   2   slots           input    i32  [batch]
 *   3   lengths         input    i32  [batch]
 *   4   attn_norm       input    T    [d]
 *   5   w_q             input    T    [dim * heads, d]
 *   6   w_k             input    T    [dim * heads, d]
 *   7   w_v             input    T    [dim * heads, d]
 *   8   k_cache         updated  T    [batch * cache, heads, dim]
 *   9   v_cache         updated  T    [batch * cache, heads, dim]
 *   10  residual_scale  input    f32  [d]
 *   11  w_o             input    T    [d, dim * heads]
 *   12  ffn_norm        input    T    [d]
 *   13  w_gate          input    T    [h, d]
 *   14  w_up            input    T    [h, d]
 *   15  w_down          input    T    [d, h]
 *   16  y               output   T    [batch, d]
 * with kv-heads: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   6  w_k      input    T  [dim * kv-heads, d]
 *   7  w_v      input    T  [dim * kv-heads, d]
 *   8  k_cache  updated  T  [batch * cache, kv-heads, dim]
 *   9  v_cache  updated  T  [batch * cache, kv-heads, dim]
 * with s: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   0   x          input   T    [batch * s, d]
 *   1   positions  input   i32  [batch * s]
 *   2   slots      input   i32  [batch * s]
 *   16  y          output  T    [batch * s, d]
 * with layers: x, positions, slots, lengths, layers.0.attn_norm, layers.0.w_q, layers.0.w_k,
 *   layers.0.w_v, layers.0.k_cache, layers.0.v_cache, layers.0.residual_scale, layers.0.w_o,
 *   layers.0.ffn_norm, layers.0.w_gate, layers.0.w_up, layers.0.w_down, layers.1.attn_norm,
 *   layers.1.w_q, layers.1.w_k, layers.1.w_v, layers.1.k_cache, layers.1.v_cache,
 *   layers.1.residual_scale, layers.1.w_o, layers.1.ffn_norm, layers.1.w_gate, layers.1.w_up,
 *   layers.1.w_down, y
 *   4   layers.0.attn_norm       input    T    [d]
 *   5   layers.0.w_q             input    T    [dim * heads, d]
 *   6   layers.0.w_k             input    T    [dim * heads, d]
 *   7   layers.0.w_v             input    T    [dim * heads, d]
 *   8   layers.0.k_cache         updated  T    [batch * cache, heads, dim]
 *   9   layers.0.v_cache         updated  T    [batch * cache, heads, dim]
 *   10  layers.0.residual_scale  input    f32  [d]
 *   11  layers.0.w_o             input    T    [d, dim * heads]
 *   12  layers.0.ffn_norm        input    T    [d]
 *   13  layers.0.w_gate          input    T    [h, d]
 *   14  layers.0.w_up            input    T    [h, d]
 *   15  layers.0.w_down          input    T    [d, h]
 *   16  layers.1.attn_norm       input    T    [d]
 *   17  layers.1.w_q             input    T    [dim * heads, d]
 *   18  layers.1.w_k             input    T    [dim * heads, d]
 *   19  layers.1.w_v             input    T    [dim * heads, d]
 *   20  layers.1.k_cache         updated  T    [batch * cache, heads, dim]
 *   21  layers.1.v_cache         updated  T    [batch * cache, heads, dim]
 *   22  layers.1.residual_scale  input    f32  [d]
 *   23  layers.1.w_o             input    T    [d, dim * heads]
 *   24  layers.1.ffn_norm        input    T    [d]
 *   25  layers.1.w_gate          input    T    [h, d]
 *   26  layers.1.w_up            input    T    [h, d]
 *   27  layers.1.w_down          input    T    [d, h]
 * with input-h: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, w_input_gate, layer_input, w_input_out,
 *   input_norm, y
 *   16  w_input_gate  input  T  [input-h, d]
 *   17  layer_input   input  T  [batch, input-h]
 *   18  w_input_out   input  T  [d, input-h]
 *   19  input_norm    input  T  [d]
 * with act=relu2: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, ffn_norm, w_up, w_down, y
 * with norm=layer: x, positions, slots, lengths, attn_norm, attn_norm_bias, w_q, w_k, w_v,
 *   k_cache, v_cache, residual_scale, w_o, ffn_norm, ffn_norm_bias, w_gate, w_up, w_down, y
 *   5   attn_norm_bias  input  T  [d]
 *   14  ffn_norm_bias   input  T  [d]
 * with post-norms=yes: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, attn_post_norm, ffn_norm, w_gate, w_up, w_down, ffn_post_norm, y
 *   12  attn_post_norm  input  T  [d]
 *   17  ffn_post_norm   input  T  [d]
 * with post-norms=only: x, positions, slots, lengths, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, attn_post_norm, w_gate, w_up, w_down, ffn_post_norm, y
 *   11  attn_post_norm  input  T  [d]
 *   15  ffn_post_norm   input  T  [d]
 * with residual-scale=each: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache,
 *   v_cache, w_o, ffn_norm, w_gate, w_up, w_down, out_scale, ffn_scale, y
 *   15  out_scale  input  f32  [d]
 *   16  ffn_scale  input  f32  [d]
 * with gate-scale=yes: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, gate_scale, y
 *   16  gate_scale  input  f32  [h]
 * with layer-scalar=yes: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache,
 *   v_cache, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, layer_scalar, y
 *   16  layer_scalar  input  f32  [1]
 * with block=parallel: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, w_gate, w_up, w_down, y
 * with ffn=plain: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, ffn_norm, w_up, w_down, y
 * with ffn=none: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, y
 * with qkv-bias=yes: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, b_q, b_k, b_v,
 *   k_cache, v_cache, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   8   b_q  input  T  [dim * heads]
 *   9   b_k  input  T  [dim * heads]
 *   10  b_v  input  T  [dim * heads]
 * with qkv-weights=packed: x, positions, slots, lengths, attn_norm, w_qkv, k_cache, v_cache,
 *   residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   5  w_qkv  input  T  [3 * dim * heads, d]
 * with qkv-weights=grouped: x, positions, slots, lengths, attn_norm, w_qkv, k_cache, v_cache,
 *   residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   5  w_qkv  input  T  [3 * dim * heads, d]
 * with qk-norm=yes: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, q_norm, k_norm,
 *   k_cache, v_cache, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   8  q_norm  input  T  [dim]
 *   9  k_norm  input  T  [dim]
 * with qk-norm=rows: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, q_norm, k_norm,
 *   k_cache, v_cache, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   8  q_norm  input  T  [dim * heads]
 *   9  k_norm  input  T  [dim * heads]
 * with qk-norm=layer: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, q_norm, k_norm,
 *   q_norm_bias, k_norm_bias, k_cache, v_cache, residual_scale, w_o, ffn_norm, w_gate, w_up,
 *   w_down, y
 *   8   q_norm       input  T  [dim]
 *   9   k_norm       input  T  [dim]
 *   10  q_norm_bias  input  T  [dim]
 *   11  k_norm_bias  input  T  [dim]
 * with keys=shared: x, positions, lengths, attn_norm, w_q, k_cache, v_cache, residual_scale, w_o,
 *   ffn_norm, w_gate, w_up, w_down, y
 *   5  k_cache  input  T  [batch, cache, heads, dim]
 *   6  v_cache  input  T  [batch, cache, heads, dim]
 * with query-scale=rows: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache,
 *   v_cache, q_factors, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   10  q_factors  input  f32  [batch]
 * with sinks=yes: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   sinks, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   10  sinks  input  f32  [heads]
 * with output-gate=features: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache,
 *   v_cache, w_g, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   10  w_g  input  T  [dim * heads, d]
 * with output-gate=heads: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache,
 *   v_cache, w_g, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   10  w_g  input  T  [heads, d]
 * with output-gate=q-rows: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache,
 *   v_cache, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   5  w_q  input  T  [2 * dim * heads, d]
 * with out-bias=yes: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, b_o, ffn_norm, w_gate, w_up, w_down, y
 *   12  b_o  input  T  [d]
 * with ffn-bias=yes: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, b_down, y
 *   16  b_down  input  T  [d]
 * with rotation=none: x, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache, v_cache,
 *   residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 * with angles=table: x, positions, angles, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache,
 *   v_cache, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   2  angles  input  f32  [4096, dim]
 * with quantise=token: x, positions, slots, lengths, attn_norm, w_qkv, w_qkv_scale, k_cache,
 *   v_cache, residual_scale, w_o, w_o_scale, ffn_norm, w_gate, w_up, w_down, w_gate_scale,
 *   w_up_scale, w_down_scale, y
 *   5   w_qkv         input  fp8  [3 * dim * heads, d]
 *   6   w_qkv_scale   input  f32  [3 * dim * heads]
 *   10  w_o           input  fp8  [d, dim * heads]
 *   11  w_o_scale     input  f32  [d]
 *   13  w_gate        input  fp8  [h, d]
 *   14  w_up          input  fp8  [h, d]
 *   15  w_down        input  fp8  [d, h]
 *   16  w_gate_scale  input  f32  [h]
 *   17  w_up_scale    input  f32  [h]
 *   18  w_down_scale  input  f32  [d]
 * with quantise=block: x, positions, slots, lengths, attn_norm, w_qkv, w_qkv_scale, k_cache,
 *   v_cache, residual_scale, w_o, w_o_scale, ffn_norm, w_gate, w_up, w_down, w_gate_scale,
 *   w_up_scale, w_down_scale, y
 *   5   w_qkv         input  fp8  [3 * dim * heads, d]
 *   6   w_qkv_scale   input  f32  [ceil(3 * dim * heads / 128), ceil(d / 128)]
 *   10  w_o           input  fp8  [d, dim * heads]
 *   11  w_o_scale     input  f32  [ceil(d / 128), ceil(dim * heads / 128)]
 *   13  w_gate        input  fp8  [h, d]
 *   14  w_up          input  fp8  [h, d]
 *   15  w_down        input  fp8  [d, h]
 *   16  w_gate_scale  input  f32  [ceil(h / 128), ceil(d / 128)]
 *   17  w_up_scale    input  f32  [ceil(h / 128), ceil(d / 128)]
 *   18  w_down_scale  input  f32  [ceil(d / 128), ceil(h / 128)]
 * with cache-format=e4m3: x, positions, slots, lengths, attn_norm, w_q, w_k, w_v, k_cache,
 *   v_cache, k_scale, v_scale, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, y
 *   8   k_cache  updated  fp8  [batch * cache, heads, dim]
 *   9   v_cache  updated  fp8  [batch * cache, heads, dim]
 *   10  k_scale  input    f32  [1]
 *   11  v_scale  input    f32  [1] */

/* sample: the next id of each sequence from its logits: the best, or a sample by temperature,
 *   top-k, top-p and min-p
 *
 *   m         1 to 2147483647             sequences (any number)
 *   vocab     1 to 524288                 ids to choose from
 *   best      1 to 64, rare               ids with the largest logits, whose log-probabilities are
 *                                         written; none if left out
 *   choose    argmax, sample, filtered    the best id; a sample by temperature; or filtered: a
 *                                         sample of the ids that top-k, top-p and min-p keep
 *   softcap   a number from 0 to 1000000  soft cap c of the logits, c tanh(x / c); 0: none
 *   logprobs  no, yes                     whether the log-probability of the chosen id is written
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  logits  input   T    [m, vocab]
 *   1  ids     output  i32  [m]
 *   2  logit   output  f32  [m]
 * with best: logits, ids, logit, best_ids, best_logprobs
 *   3  best_ids       output  i32  [m, best]
 *   4  best_logprobs  output  f32  [m, best]
 * with choose=sample: logits, temperature, seeds, steps, ids, logit
 *   1  temperature  input  f32  [m]
 *   2  seeds        input  i64  [m]
 *   3  steps        input  i32  [m]
 * with choose=filtered: logits, temperature, seeds, steps, top_k, top_p, min_p, ids, logit
 *   1  temperature  input  f32  [m]
 *   2  seeds        input  i64  [m]
 *   3  steps        input  i32  [m]
 *   4  top_k        input  i32  [m]
 *   5  top_p        input  f32  [m]
 *   6  min_p        input  f32  [m]
 * with logprobs=yes: logits, ids, logit, logprob
 *   3  logprob  output  f32  [m] */

/* head: head of a language model: norm, logits of the vocabulary, and the next ids
 *
 *   m           1 to 2147483647                       tokens (any number)
 *   d           1 to 65536                            features of a token
 *   vocab       1 to 524288                           ids to choose from
 *   best        1 to 64, rare                         ids with the largest logits, whose
 *                                                     log-probabilities are written; none if left
 *                                                     out
 *   choose      argmax, sample, filtered, none        the best id; a sample by temperature; or
 *                                                     filtered: a sample of the ids that top-k,
 *                                                     top-p and min-p keep; none: the logits are
 *                                                     the result
 *   softcap     a number from 0 to 1000000            soft cap c of the logits, c tanh(x / c); 0:
 *                                                     none
 *   logprobs    no, yes                               whether the log-probability of the chosen id
 *                                                     is written
 *   norm        rms, layer, none                      the norm of x: by the root mean square, layer
 *                                                     normalisation, or none
 *   logits      same, f32                             element type of the logits, to which they are
 *                                                     rounded before ids are chosen: that of x, or
 *                                                     f32
 *   convention  llama, gemma, t5                      where norm=rms rounds, and whether its
 *                                                     weights are kept as their distance from 1
 *   eps         a number from 0 to 1                  added to the norm's mean square
 *   bias        no, yes                               whether the product has a bias
 *   weights     dense, int4, mxfp4, fp8, int8, nvfp4  pass fwd: format of the product's weight:
 *                                                     that of x, or packed in that format
 *   group       128, 64, 32, row                      pass fwd: weights=int4, fp8 or int8: elements
 *                                                     of a row of the weight that share a scale
 *   zeros       no, yes                               pass fwd: weights=int4: whether each group
 *                                                     has a zero point, instead of 8
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x       input   T    [m, d]
 *   1  w_norm  input   T    [d]
 *   2  w       input   T    [vocab, d]
 *   3  ids     output  i32  [m]
 *   4  logit   output  f32  [m]
 * with best: x, w_norm, w, ids, logit, best_ids, best_logprobs
 *   5  best_ids       output  i32  [m, best]
 *   6  best_logprobs  output  f32  [m, best]
 * with choose=sample: x, w_norm, w, temperature, seeds, steps, ids, logit
 *   3  temperature  input  f32  [m]
 *   4  seeds        input  i64  [m]
 *   5  steps        input  i32  [m]
 * with choose=filtered: x, w_norm, w, temperature, seeds, steps, top_k, top_p, min_p, ids, logit
 *   3  temperature  input  f32  [m]
 *   4  seeds        input  i64  [m]
 *   5  steps        input  i32  [m]
 *   6  top_k        input  i32  [m]
 *   7  top_p        input  f32  [m]
 *   8  min_p        input  f32  [m]
 * with choose=none: x, w_norm, w, logits
 *   3  logits  output  T  [m, vocab]
 * with logprobs=yes: x, w_norm, w, ids, logit, logprob
 *   5  logprob  output  f32  [m]
 * with norm=layer: x, w_norm, b_norm, w, ids, logit
 *   2  b_norm  input  T  [d]
 * with norm=none: x, w, ids, logit
 * with bias=yes: x, w_norm, w, bias, ids, logit
 *   3  bias  input  T  [vocab]
 * with weights=int4: x, w_norm, w, w_scale, ids, logit
 *   2  w        input  u8  [ceil(vocab / 16) * ceil(d / 64) + 1, 512]
 *   3  w_scale  input  T   [ceil(vocab / 16), ceil(d / 128), 16]
 * with weights=mxfp4: x, w_norm, w, w_scale, ids, logit
 *   2  w        input  u8  [ceil(vocab / 16) * ceil(d / 64) + 1, 512]
 *   3  w_scale  input  u8  [ceil(vocab / 16), ceil(d / 32), 16]
 * with weights=fp8: x, w_norm, w, w_scale, ids, logit
 *   2  w        input  u8   [2 * ceil(vocab / 16) * ceil(d / 64) + 1, 512]
 *   3  w_scale  input  f32  [ceil(vocab / 16), ceil(d / 128), 16]
 * with weights=int8: x, w_norm, w, w_scale, ids, logit
 *   2  w        input  u8   [2 * ceil(vocab / 16) * ceil(d / 64) + 1, 512]
 *   3  w_scale  input  f32  [ceil(vocab / 16), ceil(d / 128), 16]
 * with weights=nvfp4: x, w_norm, w, w_scale, ids, logit
 *   2  w        input  u8  [ceil(vocab / 16) * ceil(d / 64) + 1, 512]
 *   3  w_scale  input  u8  [ceil(vocab / 16), ceil(d / 32) + 2, 32] */

/* pack-weight: codes of 4 or 8 bits with scales, in the order in which kernels read them, and
 *   back
 *
 *   n          1 to 2147483647                output features (any number)
 *   k          1 to 2147483647                input features
 *   direction  pack, unpack                   pack: to the order of kernels; unpack: back
 *   weights    int4, mxfp4, fp8, int8, nvfp4  format of the weights: integers (int4, int8), e4m3
 *                                             (fp8), e2m1 with e8m0 scales of 32 (mxfp4) or e4m3
 *                                             scales of 16 (nvfp4)
 *   group      128, 64, 32, row               weights=int4, fp8 or int8: elements of a row of the
 *                                             weight that share a scale
 *   zeros      no, yes                        weights=int4: whether each group has a zero point,
 *                                             instead of 8
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16, fp16 on the CPU
 *   0  codes    input   u8  [n, ceil(k / 2)]
 *   1  scale    input   T   [n, ceil(k / 128)]
 *   2  w        output  u8  [ceil(n / 16) * ceil(k / 64) + 1, 512]
 *   3  w_scale  output  T   [ceil(n / 16), ceil(k / 128), 16]
 * with direction=unpack: w, w_scale, unpacked, unpacked_scale
 *   0  w               input   u8  [ceil(n / 16) * ceil(k / 64) + 1, 512]
 *   1  w_scale         input   T   [ceil(n / 16), ceil(k / 128), 16]
 *   2  unpacked        output  u8  [n, ceil(k / 2)]
 *   3  unpacked_scale  output  T   [n, ceil(k / 128)]
 * with weights=mxfp4: codes, scale, w, w_scale
 *   1  scale    input   u8  [n, ceil(k / 32)]
 *   3  w_scale  output  u8  [ceil(n / 16), ceil(k / 32), 16]
 * with weights=fp8: codes, scale, w, w_scale
 *   0  codes    input   u8   [n, k]
 *   1  scale    input   f32  [n, ceil(k / 128)]
 *   2  w        output  u8   [2 * ceil(n / 16) * ceil(k / 64) + 1, 512]
 *   3  w_scale  output  f32  [ceil(n / 16), ceil(k / 128), 16]
 * with weights=int8: codes, scale, w, w_scale
 *   0  codes    input   u8   [n, k]
 *   1  scale    input   f32  [n, ceil(k / 128)]
 *   2  w        output  u8   [2 * ceil(n / 16) * ceil(k / 64) + 1, 512]
 *   3  w_scale  output  f32  [ceil(n / 16), ceil(k / 128), 16]
 * with weights=nvfp4: codes, scale, row_scale, w, w_scale
 *   1  scale      input   u8   [n, ceil(k / 16)]
 *   2  row_scale  input   f32  [n]
 *   4  w_scale    output  u8   [ceil(n / 16), ceil(k / 32) + 2, 32]
 * with group=64: codes, scale, w, w_scale
 *   1  scale    input   T  [n, ceil(k / 64)]
 *   3  w_scale  output  T  [ceil(n / 16), ceil(k / 64), 16]
 * with group=32: codes, scale, w, w_scale
 *   1  scale    input   T  [n, ceil(k / 32)]
 *   3  w_scale  output  T  [ceil(n / 16), ceil(k / 32), 16]
 * with group=row: codes, scale, w, w_scale
 *   1  scale    input   T  [n, 1]
 *   3  w_scale  output  T  [ceil(n / 16), 1, 16]
 * with zeros=yes: codes, scale, zero, w, w_scale, w_zero
 *   2  zero    input   u8  [n, ceil(k / 128)]
 *   5  w_zero  output  u8  [ceil(n / 16), ceil(k / 128), 16] */

/* cross-entropy: loss of logits and labels: log-sum-exp minus the label's logit; and its gradient
 *
 *   m                1 to 2147483647                          tokens (any number)
 *   vocab            1 to 524288                              ids; a label is one of them
 *   reduction        none, sum, mean                          a loss for each token, their sum, or
 *                                                             the sum divided by a number of items
 *   class-weights    no, yes                                  whether each id has a weight in the
 *                                                             loss
 *   ignore-index     a number from -1073741824 to 1073741824  the label of tokens without a loss
 *   label-smoothing  a number from 0 to 1                     share of the loss that all ids have
 *                                                             alike
 *   z-loss           a number from 0 to 1000000               factor of the squared log-sum-exp
 *                                                             that is added to a token's loss
 *   softcap          a number from 0 to 1000000               soft cap c of the logits, c tanh(x /
 *                                                             c); 0: none
 *   slice-of         a number from 0 to 1073741824            ids of the vocabulary that these are
 *                                                             a slice of, for tensor parallelism;
 *                                                             0: they are all of it
 *   logprobs         no, yes                                  pass fwd: whether the log-probability
 *                                                             of each label is written
 *   entropy          no, yes                                  pass fwd: whether the entropy of each
 *                                                             token's distribution is written
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  logits  input   T    [m, vocab]
 *   1  labels  input   i64  [m]
 *   2  loss    output  f32  [m]
 *   3  lse     output  f32  [m], kept
 * with reduction=sum: logits, labels, loss, lse
 *   2  loss  output  f32  [1]
 * with reduction=mean: logits, labels, items, loss, lse
 *   2  items  input   f32  [1]
 *   3  loss   output  f32  [1]
 * with class-weights=yes: logits, labels, class_weights, loss, lse
 *   2  class_weights  input  f32  [vocab]
 * with logprobs=yes: logits, labels, loss, lse, logprob
 *   4  logprob  output  f32  [m]
 * with entropy=yes: logits, labels, loss, lse, entropy
 *   4  entropy  output  f32  [m]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  dloss    input   f32  [m]
 *   1  logits   input   T    [m, vocab]
 *   2  labels   input   i64  [m]
 *   3  lse      input   f32  [m], kept
 *   4  dlogits  output  T    [m, vocab]
 * with reduction=sum: dloss, logits, labels, lse, dlogits
 *   0  dloss  input  f32  [1]
 * with reduction=mean: dloss, logits, labels, items, lse, dlogits
 *   0  dloss  input  f32  [1]
 *   3  items  input  f32  [1]
 * with class-weights=yes: dloss, logits, labels, class_weights, lse, dlogits
 *   3  class_weights  input  f32  [vocab] */

/* linear-cross-entropy: loss of a language model's head: cross-entropy of x w^T, without logits
 *   in memory
 *
 *   m                1 to 2147483647                          tokens (any number)
 *   d                1 to 2147483647                          features of a token
 *   vocab            1 to 524288                              ids; a label is one of them
 *   reduction        none, sum, mean                          a loss for each token, their sum, or
 *                                                             the sum divided by a number of items
 *   class-weights    no, yes                                  whether each id has a weight in the
 *                                                             loss
 *   ignore-index     a number from -1073741824 to 1073741824  the label of tokens without a loss
 *   label-smoothing  a number from 0 to 1                     share of the loss that all ids have
 *                                                             alike
 *   z-loss           a number from 0 to 1000000               factor of the squared log-sum-exp
 *                                                             that is added to a token's loss
 *   softcap          a number from 0 to 1000000               soft cap c of the logits, c tanh(x /
 *                                                             c); 0: none
 *   slice-of         a number from 0 to 1073741824            ids of the vocabulary that these are
 *                                                             a slice of, for tensor parallelism;
 *                                                             0: they are all of it
 *   logprobs         no, yes                                  pass fwd: whether the log-probability
 *                                                             of each label is written
 *   entropy          no, yes                                  pass fwd: whether the entropy of each
 *                                                             token's distribution is written
 *   bias             no, yes                                  whether the logits have a bias
 *   gradients        no, yes                                  pass fwd: whether the gradients of x,
 *                                                             w and bias are computed too, for a
 *                                                             loss whose gradient is 1
 *   frozen           no, yes                                  whether w and bias have no gradients
 *   accumulate       no, yes                                  whether the gradients of w and bias
 *                                                             are added to others, which may be the
 *                                                             same buffers
 *   workspace        a number from 0 to 1048576               MiB that the logits of a chunk of
 *                                                             rows may take
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x       input   T    [m, d]
 *   1  w       input   T    [vocab, d]
 *   2  labels  input   i64  [m]
 *   3  loss    output  f32  [m]
 *   4  lse     output  f32  [m], kept
 * with reduction=sum: x, w, labels, loss, lse
 *   3  loss  output  f32  [1]
 * with reduction=mean: x, w, labels, items, loss, lse
 *   3  items  input   f32  [1]
 *   4  loss   output  f32  [1]
 * with class-weights=yes: x, w, labels, class_weights, loss, lse
 *   3  class_weights  input  f32  [vocab]
 * with logprobs=yes: x, w, labels, loss, lse, logprob
 *   5  logprob  output  f32  [m]
 * with entropy=yes: x, w, labels, loss, lse, entropy
 *   5  entropy  output  f32  [m]
 * with bias=yes: x, w, bias, labels, loss, lse
 *   2  bias  input  T  [vocab]
 * with gradients=yes: x, w, labels, loss, lse, dx, dw
 *   5  dx  output  T  [m, d]
 *   6  dw  output  T  [vocab, d]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  dloss   input   f32  [m]
 *   1  x       input   T    [m, d], kept
 *   2  w       input   T    [vocab, d]
 *   3  labels  input   i64  [m]
 *   4  lse     input   f32  [m], kept
 *   5  dx      output  T    [m, d]
 *   6  dw      output  T    [vocab, d]
 * with reduction=sum: dloss, x, w, labels, lse, dx, dw
 *   0  dloss  input  f32  [1]
 * with reduction=mean: dloss, x, w, labels, items, lse, dx, dw
 *   0  dloss  input  f32  [1]
 *   4  items  input  f32  [1]
 * with class-weights=yes: dloss, x, w, labels, class_weights, lse, dx, dw
 *   4  class_weights  input  f32  [vocab]
 * with bias=yes: dloss, x, w, bias, labels, lse, dx, dw, dbias
 *   3  bias   input   T  [vocab]
 *   8  dbias  output  T  [vocab]
 * with frozen=yes: dloss, x, w, labels, lse, dx
 * with accumulate=yes: dloss, x, w, labels, lse, dw_before, dx, dw
 *   5  dw_before  input  T  [vocab, d] */

/* scale: x = factor * x in place, where a factor of 1 moves nothing; or another tensor
 *
 *   m         1 to 2147483647     tokens (any number)
 *   h         1 to 2147483647     elements of a row
 *   factors   1 to 1048576, rare  factor=ids: how many there are
 *   in-place  yes, no             whether the result takes the place of x
 *   factor    one, rows, ids      one factor; one for each row; or for each element that of its id
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x       updated  T    [m, h]
 *   1  factor  input    f32  [1]
 * with in-place=no: x, factor, y
 *   0  x  input   T  [m, h]
 *   2  y  output  T  [m, h]
 * with factor=rows: x, factor
 *   1  factor  input  f32  [m] */

/* decode: one token of a language model: embedding, layers, head, the next ids, and the state of
 *   the sequences
 *
 *   batch           1 to 65536                            sequences (any number)
 *   d               1 to 2147483647                       features of a token
 *   h               1 to 2147483647                       intermediate size of the feed-forward
 *                                                         network, or of an expert
 *   heads           1 to 1024                             heads of q; with mixer=conv heads and dim
 *                                                         make its channels
 *   dim             1 to 512                              features of a head
 *   cache           1 to 16777216                         keys that the cache has room for, of a
 *                                                         sequence; not of mixers with a state:
 *                                                         there tokens that a sequence may have,
 *                                                         any number if left out
 *   kv-heads        1 to 1024, rare                       heads of k, and of v; heads if left out
 *   layers          1 to 256, rare                        number of layers, each with its own
 *                                                         weights and caches
 *   experts         1 to 1024, rare                       experts to choose from, with ffn=moe
 *   top-k           1 to 32, rare                         experts that a token chooses
 *   width           1 to 8, rare                          taps of a mixer's convolution, 2 to 8
 *   nope            1 to 512, rare                        mixer=mla: features of a head of q that
 *                                                         are not rotated
 *   rope            1 to 256, rare                        mixer=mla: those that are, and features
 *                                                         of the rotated key
 *   v-dim           1 to 512, rare                        mixer=mla, gated-delta-rule and kda:
 *                                                         features of a head's values
 *   rank            1 to 1024, rare                       mixer=mla: features of the latent of keys
 *                                                         and values
 *   q-rank          1 to 16777216, rare                   mixer=mla: those of the queries' latent;
 *                                                         none if left out
 *   v-heads         1 to 1024, rare                       mixer=gated-delta-rule and kda: heads of
 *                                                         v, a multiple of heads; as many if left
 *                                                         out
 *   gate-rank       1 to 16777216, rare                   mixer=kda: features between two products
 *                                                         to the decays, and to the gates of the
 *                                                         output; one product each if left out
 *   state-block     1 to 17179869184, rare                elements from an entry of the cache of
 *                                                         states of heads to the next, for a part
 *                                                         of a page; contiguous if left out
 *   conv-block      1 to 17179869184, rare                as state-block, for states of a
 *                                                         convolution
 *   conv-entries    1 to 24, rare                         inputs that a convolution's state holds,
 *                                                         width - 1 or more; width if left out
 *   state-dim       1 to 256, rare                        mixer=ssd: features of a group of B and C
 *   state-groups    1 to 1024, rare                       mixer=ssd: groups of heads that share B
 *                                                         and C, and have a norm
 *   ssm-heads       1 to 1024, rare                       mixer=attention-ssd: heads of ssd; heads
 *                                                         are those of attention
 *   ssm-dim         1 to 512, rare                        mixer=attention-ssd: features of a head
 *                                                         of ssd
 *   shared          1 to 8, rare                          experts that every token goes through;
 *                                                         left out: none
 *   own-experts     1 to 1024, rare                       experts in the weights, the slice of a
 *                                                         rank of a group: the tensor first_expert
 *                                                         says which; all if left out
 *   shared-h        1 to 16777216, rare                   intermediate size of a network with
 *                                                         weights of its own beside the experts,
 *                                                         for every token; left out: none
 *   input-h         1 to 16777216, rare                   features of an input of the layer's own
 *                                                         for each token, which a gate of its
 *                                                         output takes; left out: none
 *   groups          1 to 32, rare                         groups of experts: a token uses the best
 *                                                         ones; left out: none
 *   top-groups      1 to 32, rare                         groups that a token uses; all if left out
 *   window          1 to 1073741824, rare                 keys of a query at most, the nearest; all
 *                                                         if left out
 *   rotary          1 to 512, rare                        features of a head to rotate; all if left
 *                                                         out
 *   ranks           1 to 8, rare                          ranks of a group, each with its slice:
 *                                                         heads, kv-heads, h and shared-h are the
 *                                                         slice's; one GPU has all if left out
 *   page            1 to 256, rare                        keys of a page of the caches, 16 to 256,
 *                                                         a power of two; one that is not in memory
 *                                                         is zeros; contiguous if left out
 *   pages           1 to 67108864, rare                   pages of a layer's cache; what the
 *                                                         sequences take if left out
 *   kv-head         1 to 16777216, rare                   elements from a head of the caches to the
 *                                                         next one, a multiple of dim; dim if left
 *                                                         out
 *   positions       1 to 1073741824, rare                 rows of the table of angles; 4096 if left
 *                                                         out
 *   vocab           1 to 524288                           ids to choose from
 *   best            1 to 64, rare                         ids with the largest logits, whose
 *                                                         log-probabilities are written; none if
 *                                                         left out
 *   stops           1 to 1024, rare                       ids that end a sequence; none if left out
 *   room            1 to 16777216, rare                   ids of a sequence that `out` has room
 *                                                         for; the cache's keys if left out
 *   act                                                   silu, gelu, gelu-tanh, relu, none,
 *                                                         swiglu-oai, relu2: activation of the
 *                                                         feed-forward network; relu2: relu(x)² of
 *                                                         networks without gates, which experts
 *                                                         then have none of
 *   norm            rms, layer                            normalisation of rows: by the root mean
 *                                                         square, or layer normalisation with
 *                                                         biases
 *   post-norms      no, yes, only                         whether the results of attention and of
 *                                                         the feed-forward network are normalised
 *                                                         before they are added; only: their inputs
 *                                                         are not
 *   residual-scale  no, yes, each                         whether a vector multiplies what is added
 *                                                         to the residual; each: one of each
 *                                                         product; experts have route-scale
 *   gate-scale      no, yes                               whether a vector multiplies the gates of
 *                                                         the feed-forward network in front of
 *                                                         their activation
 *   expert-norms    no, yes                               whether the router, the experts and the
 *                                                         network of shared-h, which is beside
 *                                                         them, each have norms of their own
 *   expert-scale    no, yes                               whether the weight of a token's expert is
 *                                                         multiplied by a number of the expert
 *   layer-scalar    no, yes                               whether one number multiplies the layer's
 *                                                         output
 *   block           serial, parallel, parallel-norms      serial: the feed-forward network follows
 *                                                         attention; parallel: it takes the same
 *                                                         normalised x; parallel-norms: it takes x
 *                                                         by a second norm
 *   ffn             gated, plain, moe, none               the feed-forward network: with a gate,
 *                                                         plain without, a mixture of experts with
 *                                                         gates, or none in a layer that is its
 *                                                         mixer alone
 *   score           softmax, sigmoid                      function of a router's logit that gives
 *                                                         an expert's score
 *   order           before, after                         whether the router's softmax is over all
 *                                                         experts, before the choice, or over the
 *                                                         chosen ones after it
 *   renormalise     no, yes                               whether the weights of a token's experts
 *                                                         add up to 1
 *   sum-eps         usual, 1e-06                          added to the sum of a token's scores that
 *                                                         its weights are divided by, as in
 *                                                         moe-route
 *   group-score     max, top2                             score of a group of experts: its best
 *                                                         expert, or the sum of its best two
 *   choice-bias     no, yes                               whether a bias is added to the experts'
 *                                                         scores for the choice alone
 *   logits          same, f32                             element type of the router's logits: that
 *                                                         of x, or f32
 *   router-bias     no, yes                               whether the router's product has a bias
 *   route-scale     a number from 1e-06 to 1000000        a factor of the weights of a token's
 *                                                         experts
 *   shared-gate     no, yes                               whether the network of shared-h is
 *                                                         weighted by the sigmoid of a product of
 *                                                         its own
 *   gate-up         separate, halves, interleaved         the experts' weights of gate and up:
 *                                                         separate, or one w_gate_up; halves: rows
 *                                                         of gate, then of up; interleaved: they
 *                                                         alternate
 *   routing                                               uniform, or zipf:SKEW with a skew from 0
 *                                                         to 4, or file:IDS, a text file of ids:
 *                                                         distribution of the chosen experts, for
 *                                                         test data and the choice of a preset
 *   convention      llama, gemma, t5                      where the norms round, and whether
 *                                                         weights are kept as their distance from 1
 *   eps             a number from 0 to 1                  added to the norms' mean square
 *   qkv-bias        no, yes                               whether q, k and v have a bias
 *   qkv-weights     separate, packed, grouped             the weights of q, k and v: separate, or
 *                                                         one w_qkv; packed: all rows of q, then k,
 *                                                         then v; grouped: for each head of k its
 *                                                         heads of q, then k, then v; with
 *                                                         mixer=gated-delta-rule q, k, v and z in
 *                                                         w_qkvz, and b and a in w_ba
 *   qk-norm         no, yes, rows, layer                  norms of q and k; yes: RMSNorm of each
 *                                                         head; rows: RMSNorm over all heads;
 *                                                         layer: layer normalisation of each head
 *   qk-norm-order   before, after                         whether heads are normalised before RoPE
 *                                                         or after it
 *   v-norm          no, yes                               whether each head of v has an RMSNorm,
 *                                                         without weights
 *   keys            own, shared                           whether the layer has keys and values of
 *                                                         its own, or reads those of another one in
 *                                                         its caches
 *   query-scale     no, rows                              whether the queries of each token have a
 *                                                         factor
 *   sinks           no, yes                               whether each head has a logit that joins
 *                                                         attention's softmax without a value
 *   beta-scale      a number from 0 to 2                  factor of beta in mixer=gated-delta-rule
 *   gate-bound      a number from -100 to 0               mixer=kda: the decays' bound, which
 *                                                         sigmoids approach; 0: decays by softplus
 *   dt-min          a number from 0 to 1000000            mixer=ssd: the least step
 *   dt-max          a number from 0 to 1000000            mixer=ssd: the largest step; 0: no limit
 *   mixer-norm      gated, none                           mixer=ssd: the norm of what its gate has
 *                                                         multiplied, or none
 *   in-scale        no, yes                               mixer=ssd: whether a vector multiplies
 *                                                         the result of the product in front of it
 *   mixer-eps       a number from 0 to 1                  added to the mean square of a mixer's own
 *                                                         norm
 *   output-gate     no, features, heads, q-rows           sigmoids of a product of attention's
 *                                                         input that multiply its output: one for
 *                                                         each feature, or for each head; q-rows:
 *                                                         for each feature, and w_q has behind the
 *                                                         rows of each head those of its gates
 *   conv-bias       no, yes                               whether a mixer's convolution has a bias,
 *                                                         and with mixer=conv the product in front
 *                                                         of it
 *   conv-order      channels, entries                     order of a convolution's state:
 *                                                         [channels, entries] or [entries,
 *                                                         channels]
 *   state-layout    kv, vk                                mixer=gated-delta-rule and kda: states
 *                                                         [dim, v-dim] or [v-dim, dim]
 *   state-dtype     f32, bf16                             element type of states of heads
 *   out-bias        no, yes                               whether the output product has a bias
 *   ffn-bias        no, yes                               whether the feed-forward network has
 *                                                         biases
 *   rotation        halves, interleaved, none             RoPE of q and k: pairs rotary/2 apart,
 *                                                         neighbours, or none
 *   rope-order      same, halves                          mixer=mla: order of rotated neighbours,
 *                                                         as in mla-rope
 *   latent-eps      a number from 0 to 1                  mixer=mla: added to the mean square of
 *                                                         the latents' norms
 *   softcap         a number from 0 to 1000000            soft cap c of attention's scores, c
 *                                                         tanh(x / c); 0: none
 *   scale           a number from 0 to 1000000            scale of attention's scores; 0: 1 /
 *                                                         sqrt(dim), or 1 / sqrt(nope + rope)
 *   link            loopback, peers, nccl                 how ranks sum; peers: through a group's
 *                                                         memory; nccl: by NCCL; loopback: one rank
 *                                                         plays all, with equal summands
 *   lengths         full, ragged                          keys of the sequences in tests and
 *                                                         measurements: as many as the cache has
 *                                                         room for, or fewer
 *   angles          base, table, llama3, yarn             a table is given, or the rule by which
 *                                                         frequencies are computed
 *   base            a number from 1 to 1000000000000      base of the computed frequencies
 *   factor          a number from 0.001 to 1000000        factor by which the rule stretches
 *                                                         positions
 *   context         a number from 1 to 1000000000         positions that the model was trained with
 *   low             a number from 0.001 to 1000000        llama3: context/low is the longest
 *                                                         wavelength that is interpolated
 *   high            a number from 0.001 to 1000000        llama3: context/high is the longest
 *                                                         wavelength that is left alone
 *   beta-fast       a number from 0.001 to 1000000        yarn: rotations in the context from which
 *                                                         a pair is left alone
 *   beta-slow       a number from 0.001 to 1000000        yarn: rotations in the context up to
 *                                                         which a pair is stretched
 *   rope-scale      a number from 0 to 1000000            factor of all sines and cosines; 0: the
 *                                                         rule's own
 *   weights         dense, int4, mxfp4, fp8, int8, nvfp4  pass fwd: format of w_qkv, the output
 *                                                         product and the gated network or experts:
 *                                                         dense, or packed as linear has it
 *   group           128, 64, 32, row                      pass fwd: weights=int4, fp8 or int8:
 *                                                         elements of a row of the weight that
 *                                                         share a scale
 *   zeros           no, yes                               pass fwd: weights=int4: whether each
 *                                                         group has a zero point, instead of 8
 *   attn-weights    same, dense                           with packed weights or quantise:
 *                                                         attention's weights have the network's
 *                                                         format, or are dense, as in gpt-oss
 *   quantise        no, token, block                      pass fwd: whether tokens are quantised to
 *                                                         e4m3, for weights of e4m3: with a scale
 *                                                         for each token and row of a weight, or
 *                                                         each 128 elements and block of 128 x 128
 *   mixer                                                 attention, conv, mla, gated-delta-rule,
 *                                                         kda, ssd, attention-ssd, none: what mixes
 *                                                         the tokens: attention, attention over a
 *                                                         cache of keys and values; conv, a short
 *                                                         convolution with gates in front of it and
 *                                                         behind it, as in LFM2; mla, latent
 *                                                         attention in the absorbed form, over a
 *                                                         cache of latents; gated-delta-rule,
 *                                                         linear attention by the gated delta rule
 *                                                         behind short convolutions; kda, Kimi
 *                                                         Delta Attention, the gated delta rule
 *                                                         with a decay of each feature; ssd, state
 *                                                         space duality behind short convolutions,
 *                                                         as in Mamba-2; attention-ssd, attention
 *                                                         and ssd on the same input, as in
 *                                                         Falcon-H1; none, for layers that are a
 *                                                         feed-forward network alone
 *   cache-format    same, e4m3                            element type of cached keys and values:
 *                                                         that of q, or e4m3 with f32 scales
 *   cache-scales    tensor, head                          scales of keys and of values in e4m3: one
 *                                                         for the tensor, or each head's own
 *   pattern         a text                                the kinds of the layers in order, from
 *                                                         the first on again behind the last one:
 *                                                         bbba is three layers b and one a; with
 *                                                         `layers` and several kinds
 *   angles-for      all, kinds                            with several kinds of layers, whether all
 *                                                         rotate by the same angles, or each kind
 *                                                         by its own
 *   layers-b        a text                                the mixer and the fields of layers b in
 *                                                         the pattern, as
 *                                                         conv:dim=64,h=8192,heads=32,width=3;
 *                                                         batch, d, cache, page, pages and lengths
 *                                                         are those of all layers
 *   layers-c        a text                                the mixer and the fields of layers c in
 *                                                         the pattern, as
 *                                                         conv:dim=64,h=8192,heads=32,width=3;
 *                                                         batch, d, cache, page, pages and lengths
 *                                                         are those of all layers
 *   choose          argmax, sample, filtered              the best id; a sample by temperature; or
 *                                                         filtered: a sample of the ids that top-k,
 *                                                         top-p and min-p keep
 *   logit-softcap   a number from 0 to 1000000            soft cap c of the logits, c tanh(x / c);
 *                                                         0: none
 *   logprobs        no, yes                               whether the log-probability of the chosen
 *                                                         id is written
 *   head-logits     same, f32                             element type of the logits, to which they
 *                                                         are rounded before ids are chosen: that
 *                                                         of x, or f32
 *   head-bias       no, yes                               whether the product has a bias
 *   head-weights    dense, int4, mxfp4, fp8, int8, nvfp4  pass fwd: format of the product's weight:
 *                                                         that of x, or packed in that format
 *   head-group      128, 64, 32, row                      pass fwd: weights=int4, fp8 or int8:
 *                                                         elements of a row of the weight that
 *                                                         share a scale
 *   head-zeros      no, yes                               pass fwd: weights=int4: whether each
 *                                                         group has a zero point, instead of 8
 *   head            whole, sliced                         with ranks, whether each has all rows of
 *                                                         the head or, sliced, its part of them
 *   embed-scale     a number from -1000000 to 1000000     a factor of the embedding
 *   pad             a number from 0 to 2147483647         the id of a sequence that has ended
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0   ids         updated  i32  [batch]
 *   1   lengths     updated  i32  [batch]
 *   2   steps       updated  i32  [batch]
 *   3   ended       updated  i32  [batch]
 *   4   out         updated  i32  [batch, cache]
 *   5   limits      input    i32  [batch]
 *   6   embedding   input    T    [vocab, d]
 *   7   attn_norm   input    T    [d]
 *   8   w_q         input    T    [dim * heads, d]
 *   9   w_k         input    T    [dim * heads, d]
 *   10  w_v         input    T    [dim * heads, d]
 *   11  k_cache     updated  T    [batch * cache, heads, dim]
 *   12  v_cache     updated  T    [batch * cache, heads, dim]
 *   13  w_o         input    T    [d, dim * heads]
 *   14  ffn_norm    input    T    [d]
 *   15  w_gate      input    T    [h, d]
 *   16  w_up        input    T    [h, d]
 *   17  w_down      input    T    [d, h]
 *   18  final_norm  input    T    [d]
 *   19  w_head      input    T    [vocab, d]
 *   20  chosen      output   i32  [batch]
 *   21  logit       output   f32  [batch]
 * with kv-heads: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k, w_v,
 *   k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, chosen, logit
 *   9   w_k      input    T  [dim * kv-heads, d]
 *   10  w_v      input    T  [dim * kv-heads, d]
 *   11  k_cache  updated  T  [batch * cache, kv-heads, dim]
 *   12  v_cache  updated  T  [batch * cache, kv-heads, dim]
 * with layers: ids, lengths, steps, ended, out, limits, embedding, layers.0.attn_norm,
 *   layers.0.w_q, layers.0.w_k, layers.0.w_v, layers.0.k_cache, layers.0.v_cache, layers.0.w_o,
 *   layers.0.ffn_norm, layers.0.w_gate, layers.0.w_up, layers.0.w_down, layers.1.attn_norm,
 *   layers.1.w_q, layers.1.w_k, layers.1.w_v, layers.1.k_cache, layers.1.v_cache, layers.1.w_o,
 *   layers.1.ffn_norm, layers.1.w_gate, layers.1.w_up, layers.1.w_down, final_norm, w_head, chosen,
 *   logit
 *   7   layers.0.attn_norm  input    T  [d]
 *   8   layers.0.w_q        input    T  [dim * heads, d]
 *   9   layers.0.w_k        input    T  [dim * heads, d]
 *   10  layers.0.w_v        input    T  [dim * heads, d]
 *   11  layers.0.k_cache    updated  T  [batch * cache, heads, dim]
 *   12  layers.0.v_cache    updated  T  [batch * cache, heads, dim]
 *   13  layers.0.w_o        input    T  [d, dim * heads]
 *   14  layers.0.ffn_norm   input    T  [d]
 *   15  layers.0.w_gate     input    T  [h, d]
 *   16  layers.0.w_up       input    T  [h, d]
 *   17  layers.0.w_down     input    T  [d, h]
 *   18  layers.1.attn_norm  input    T  [d]
 *   19  layers.1.w_q        input    T  [dim * heads, d]
 *   20  layers.1.w_k        input    T  [dim * heads, d]
 *   21  layers.1.w_v        input    T  [dim * heads, d]
 *   22  layers.1.k_cache    updated  T  [batch * cache, heads, dim]
 *   23  layers.1.v_cache    updated  T  [batch * cache, heads, dim]
 *   24  layers.1.w_o        input    T  [d, dim * heads]
 *   25  layers.1.ffn_norm   input    T  [d]
 *   26  layers.1.w_gate     input    T  [h, d]
 *   27  layers.1.w_up       input    T  [h, d]
 *   28  layers.1.w_down     input    T  [d, h]
 * with input-h: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k, w_v,
 *   k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, w_input_gate, layer_input, w_input_out,
 *   input_norm, final_norm, w_head, chosen, logit
 *   18  w_input_gate  input  T  [input-h, d]
 *   19  layer_input   input  T  [batch, input-h]
 *   20  w_input_out   input  T  [d, input-h]
 *   21  input_norm    input  T  [d]
 * with best: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k, w_v,
 *   k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, chosen, logit,
 *   best_ids, best_logprobs
 *   22  best_ids       output  i32  [batch, best]
 *   23  best_logprobs  output  f32  [batch, best]
 * with stops: ids, lengths, steps, ended, out, limits, stop, embedding, attn_norm, w_q, w_k, w_v,
 *   k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, chosen, logit
 *   6  stop  input  i32  [stops]
 * with room: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k, w_v,
 *   k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, chosen, logit
 *   4  out  updated  i32  [batch, room]
 * with norm=layer: ids, lengths, steps, ended, out, limits, embedding, attn_norm, attn_norm_bias,
 *   w_q, w_k, w_v, k_cache, v_cache, w_o, ffn_norm, ffn_norm_bias, w_gate, w_up, w_down,
 *   final_norm, final_norm_bias, w_head, chosen, logit
 *   8   attn_norm_bias   input  T  [d]
 *   16  ffn_norm_bias    input  T  [d]
 *   21  final_norm_bias  input  T  [d]
 * with post-norms=yes: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, k_cache, v_cache, w_o, attn_post_norm, ffn_norm, w_gate, w_up, w_down, ffn_post_norm,
 *   final_norm, w_head, chosen, logit
 *   14  attn_post_norm  input  T  [d]
 *   19  ffn_post_norm   input  T  [d]
 * with post-norms=only: ids, lengths, steps, ended, out, limits, embedding, w_q, w_k, w_v,
 *   k_cache, v_cache, w_o, attn_post_norm, w_gate, w_up, w_down, ffn_post_norm, final_norm, w_head,
 *   chosen, logit
 *   13  attn_post_norm  input  T  [d]
 *   17  ffn_post_norm   input  T  [d]
 * with residual-scale=yes: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q,
 *   w_k, w_v, k_cache, v_cache, residual_scale, w_o, ffn_norm, w_gate, w_up, w_down, final_norm,
 *   w_head, chosen, logit
 *   13  residual_scale  input  f32  [d]
 * with residual-scale=each: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q,
 *   w_k, w_v, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, out_scale, ffn_scale,
 *   final_norm, w_head, chosen, logit
 *   18  out_scale  input  f32  [d]
 *   19  ffn_scale  input  f32  [d]
 * with gate-scale=yes: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, gate_scale, final_norm, w_head,
 *   chosen, logit
 *   18  gate_scale  input  f32  [h]
 * with layer-scalar=yes: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, layer_scalar, final_norm, w_head,
 *   chosen, logit
 *   18  layer_scalar  input  f32  [1]
 * with block=parallel: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, k_cache, v_cache, w_o, w_gate, w_up, w_down, final_norm, w_head, chosen, logit
 * with ffn=plain: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k, w_v,
 *   k_cache, v_cache, w_o, ffn_norm, w_up, w_down, final_norm, w_head, chosen, logit
 * with ffn=none: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k, w_v,
 *   k_cache, v_cache, w_o, final_norm, w_head, chosen, logit
 * with qkv-bias=yes: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, b_q, b_k, b_v, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head,
 *   chosen, logit
 *   11  b_q  input  T  [dim * heads]
 *   12  b_k  input  T  [dim * heads]
 *   13  b_v  input  T  [dim * heads]
 * with qkv-weights=packed: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_qkv,
 *   k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, chosen, logit
 *   8  w_qkv  input  T  [3 * dim * heads, d]
 * with qkv-weights=grouped: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_qkv,
 *   k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, chosen, logit
 *   8  w_qkv  input  T  [3 * dim * heads, d]
 * with qk-norm=yes: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k, w_v,
 *   q_norm, k_norm, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head,
 *   chosen, logit
 *   11  q_norm  input  T  [dim]
 *   12  k_norm  input  T  [dim]
 * with qk-norm=rows: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, q_norm, k_norm, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head,
 *   chosen, logit
 *   11  q_norm  input  T  [dim * heads]
 *   12  k_norm  input  T  [dim * heads]
 * with qk-norm=layer: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, q_norm, k_norm, q_norm_bias, k_norm_bias, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up,
 *   w_down, final_norm, w_head, chosen, logit
 *   11  q_norm       input  T  [dim]
 *   12  k_norm       input  T  [dim]
 *   13  q_norm_bias  input  T  [dim]
 *   14  k_norm_bias  input  T  [dim]
 * with sinks=yes: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k, w_v,
 *   k_cache, v_cache, sinks, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, chosen, logit
 *   13  sinks  input  f32  [heads]
 * with output-gate=features: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q,
 *   w_k, w_v, k_cache, v_cache, w_g, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head,
 *   chosen, logit
 *   13  w_g  input  T  [dim * heads, d]
 * with output-gate=heads: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q,
 *   w_k, w_v, k_cache, v_cache, w_g, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head,
 *   chosen, logit
 *   13  w_g  input  T  [heads, d]
 * with output-gate=q-rows: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q,
 *   w_k, w_v, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, chosen,
 *   logit
 *   8  w_q  input  T  [2 * dim * heads, d]
 * with out-bias=yes: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, k_cache, v_cache, w_o, b_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, chosen,
 *   logit
 *   14  b_o  input  T  [d]
 * with ffn-bias=yes: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, b_down, final_norm, w_head, chosen,
 *   logit
 *   18  b_down  input  T  [d]
 * with angles=table: ids, lengths, steps, ended, out, limits, embedding, angles, attn_norm, w_q,
 *   w_k, w_v, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, chosen,
 *   logit
 *   7  angles  input  f32  [4096, dim]
 * with quantise=token: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_qkv,
 *   w_qkv_scale, k_cache, v_cache, w_o, w_o_scale, ffn_norm, w_gate, w_up, w_down, w_gate_scale,
 *   w_up_scale, w_down_scale, final_norm, w_head, chosen, logit
 *   8   w_qkv         input  fp8  [3 * dim * heads, d]
 *   9   w_qkv_scale   input  f32  [3 * dim * heads]
 *   12  w_o           input  fp8  [d, dim * heads]
 *   13  w_o_scale     input  f32  [d]
 *   15  w_gate        input  fp8  [h, d]
 *   16  w_up          input  fp8  [h, d]
 *   17  w_down        input  fp8  [d, h]
 *   18  w_gate_scale  input  f32  [h]
 *   19  w_up_scale    input  f32  [h]
 *   20  w_down_scale  input  f32  [d]
 * with quantise=block: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_qkv,
 *   w_qkv_scale, k_cache, v_cache, w_o, w_o_scale, ffn_norm, w_gate, w_up, w_down, w_gate_scale,
 *   w_up_scale, w_down_scale, final_norm, w_head, chosen, logit
 *   8   w_qkv         input  fp8  [3 * dim * heads, d]
 *   9   w_qkv_scale   input  f32  [ceil(3 * dim * heads / 128), ceil(d / 128)]
 *   12  w_o           input  fp8  [d, dim * heads]
 *   13  w_o_scale     input  f32  [ceil(d / 128), ceil(dim * heads / 128)]
 *   15  w_gate        input  fp8  [h, d]
 *   16  w_up          input  fp8  [h, d]
 *   17  w_down        input  fp8  [d, h]
 *   18  w_gate_scale  input  f32  [ceil(h / 128), ceil(d / 128)]
 *   19  w_up_scale    input  f32  [ceil(h / 128), ceil(d / 128)]
 *   20  w_down_scale  input  f32  [ceil(d / 128), ceil(h / 128)]
 * with cache-format=e4m3: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q,
 *   w_k, w_v, k_cache, v_cache, k_scale, v_scale, w_o, ffn_norm, w_gate, w_up, w_down, final_norm,
 *   w_head, chosen, logit
 *   11  k_cache  updated  fp8  [batch * cache, heads, dim]
 *   12  v_cache  updated  fp8  [batch * cache, heads, dim]
 *   13  k_scale  input    f32  [1]
 *   14  v_scale  input    f32  [1]
 * with choose=sample: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, temperature,
 *   seeds, chosen, logit
 *   20  temperature  input  f32  [batch]
 *   21  seeds        input  i64  [batch]
 * with choose=filtered: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, temperature,
 *   seeds, top_k, top_p, min_p, chosen, logit
 *   20  temperature  input  f32  [batch]
 *   21  seeds        input  i64  [batch]
 *   22  top_k        input  i32  [batch]
 *   23  top_p        input  f32  [batch]
 *   24  min_p        input  f32  [batch]
 * with logprobs=yes: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, chosen, logit,
 *   logprob
 *   22  logprob  output  f32  [batch]
 * with head-bias=yes: ids, lengths, steps, ended, out, limits, embedding, attn_norm, w_q, w_k,
 *   w_v, k_cache, v_cache, w_o, ffn_norm, w_gate, w_up, w_down, final_norm, w_head, b_head, chosen,
 *   logit
 *   20  b_head  input  T  [vocab] */

/* all-reduce: sum of x over the ranks of a group, with the residual and RMSNorm behind it
 *
 *   m         1 to 2147483647         tokens (any number)
 *   d         1 to 65536              features of a token
 *   ranks     1 to 8                  ranks of the group
 *   norm      none, llama, gemma, t5  RMSNorm of the sum, by rmsnorm's convention
 *   residual  no, yes                 add a residual to the sum; with a norm, write the sum too
 *   eps       a number from 0 to 1    added to the mean square
 *   output    same, fp8, fp8-static   element type of the norm: the op's; fp8 with a scale for each
 *                                     token; or fp8 with a given scale
 *   link      loopback, peers, nccl   peers: through a group's memory; nccl: by NCCL; loopback: one
 *                                     rank plays all, with equal x
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x  input   T  [m, d]
 *   1  y  output  T  [m, d]
 * with norm=llama: x, w, y
 *   1  w  input  T  [d]
 * with norm=gemma: x, w, y
 *   1  w  input  T  [d]
 * with norm=t5: x, w, y
 *   1  w  input  T  [d]
 * with residual=yes: x, residual, y
 *   1  residual  input  T  [m, d]
 * with link=peers: x, group, y
 *   1  group  input  i64  [18]
 * with link=nccl: x, group, y
 *   1  group  input  i64  [18] */

/* all-argmax: the best of the ids that the ranks of a group chose, each from its slice of the
 *   vocabulary
 *
 *   m      1 to 65536             tokens (any number)
 *   vocab  1 to 134217728         ids of a rank's slice
 *   ranks  1 to 8                 ranks of the group
 *   link   loopback, peers, nccl  peers: through a group's memory; loopback: one rank plays all,
 *                                 with equal ids and logits; nccl: between hosts, not supported
 *
 * Pass fwd: dtype f32 on CUDA; f32 on the CPU
 *   0  ids         input   i32  [m]
 *   1  logit       input   T    [m]
 *   2  best_ids    output  i32  [m]
 *   3  best_logit  output  T    [m]
 * with link=peers: ids, logit, group, best_ids, best_logit
 *   2  group  input  i64  [18]
 * with link=nccl: ids, logit, group, best_ids, best_logit
 *   2  group  input  i64  [18] */

/* causal-conv1d: depthwise causal convolution of sequences, with bias, SiLU and states
 *
 *   s            1 to 16777216           tokens of a sequence; in layout sc of all sequences
 *                                        together (any number)
 *   b            1 to 65536              sequences
 *   channels     1 to 1048576            channels
 *   width        1 to 8                  taps, 2 to 8
 *   x-row        1 to 17179869184, rare  stride of x between tokens, in elements, for columns of a
 *                                        wider tensor; channels if left out, or three times as many
 *                                        with gates
 *   x-groups     1 to 2147483647, rare   heads of k, of which x has the channels of q, k and v next
 *                                        to each other, as Qwen3-Next's projection gives them;
 *                                        without it x has the order of the channels
 *   x-keys       1 to 2147483647, rare   with x-groups: channels of q, and of k, of a group; the
 *                                        others are of v
 *   entries      1 to 24, rare           inputs that a state holds, width - 1 or more; width if
 *                                        left out
 *   slots        1 to 2147483647, rare   states in memory, found by indices; without it a state for
 *                                        each sequence
 *   state-row    1 to 17179869184, rare  stride between states, in elements, for a part of a page;
 *                                        contiguous if left out
 *   layout       bsc, sc                 [b, s, channels], or packed sequences [s, channels]
 *   act          none, silu              activation of the sum
 *   bias         no, yes                 whether there is a bias
 *   gates        no, yes                 pass fwd: whether a token of x is B, C and values: B
 *                                        multiplies these in front of the convolution, and C its
 *                                        result
 *   state        none, update, pass      the inputs before the first token: zeros, a state that is
 *                                        updated in place, or an initial and a final one
 *   state-order  entries, channels       order of a state: [entries, channels] or [channels,
 *                                        entries]
 *   has-state    no, yes                 pass fwd: whether a byte for each sequence says if its
 *                                        state counts
 *   accepted     no, yes                 pass fwd: whether each sequence says how many tokens of
 *                                        the last run were accepted
 *   first-slot   a number from 0 to 1    pass fwd: the least index of a slot: sequences with lower
 *                                        ones are padding
 *   weights      same, f32               element type of w and bias: the op's, or f32
 *   frozen       no, yes                 pass bwd: whether w and bias have no gradients
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x  input   T  [b, s, channels]
 *   1  w  input   T  [channels, width]
 *   2  y  output  T  [b, s, channels]
 * with x-row: x, w, y
 *   0  x  input  T  [b, s, x-row]
 * with slots: x, w, indices, y
 *   2  indices  input  i32  [b]
 * with layout=sc: x, w, offsets, y
 *   0  x        input   T    [s, channels]
 *   2  offsets  input   i32  [b + 1]
 *   3  y        output  T    [s, channels]
 * with bias=yes: x, w, bias, y
 *   2  bias  input  T  [channels]
 * with gates=yes: x, w, y
 *   0  x  input  T  [b, s, 3 * channels]
 * with state=update: x, w, state, y
 *   2  state  updated  T  [b, width, channels]
 * with state=pass: x, w, initial, y, final
 *   2  initial  input   T  [b, width, channels]
 *   4  final    output  T  [b, width, channels]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  dy  input   T  [b, s, channels]
 *   1  x   input   T  [b, s, channels]
 *   2  w   input   T  [channels, width]
 *   3  dx  output  T  [b, s, channels]
 *   4  dw  output  T  [channels, width]
 * with x-row: dy, x, w, dx, dw
 *   1  x  input  T  [b, s, x-row]
 * with slots: dy, x, w, indices, dx, dw
 *   3  indices  input  i32  [b]
 * with layout=sc: dy, x, w, offsets, dx, dw
 *   0  dy       input   T    [s, channels]
 *   1  x        input   T    [s, channels]
 *   3  offsets  input   i32  [b + 1]
 *   4  dx       output  T    [s, channels]
 * with bias=yes: dy, x, w, bias, dx, dw, dbias
 *   3  bias   input   T  [channels]
 *   6  dbias  output  T  [channels]
 * with state=pass: dy, x, w, initial, d_final, dx, dw, d_initial
 *   3  initial    input   T  [b, width, channels]
 *   4  d_final    input   T  [b, width, channels]
 *   7  d_initial  output  T  [b, width, channels]
 * with frozen=yes: dy, x, w, dx */

/* gated-rmsnorm: RMSNorm with a gate behind it or before it: y = rmsnorm(x) * act(z), or
 *   rmsnorm(x * act(z))
 *
 *   m            1 to 2147483647         tokens (any number)
 *   d            1 to 65536              features of a norm
 *   groups       1 to 1024, rare         norms of a token, each with its own part of w, or with
 *                                        weights-for=token all with one
 *   z-row        1 to 17179869184, rare  stride of z between tokens, in elements, for columns of a
 *                                        wider tensor; groups * d if left out, or groups with
 *                                        gate-for=norm
 *   order        after, before           the gate comes after the norm, or before it
 *   gate         silu, sigmoid           activation of z
 *   convention   t5, llama               t5 rounds once, at the end; llama rounds the normalised
 *                                        value too, and its product with w
 *   weights      same, f32               element type of w and dw: the op's, or f32
 *   eps          a number from 0 to 1    added to the mean square
 *   norm         rms, none               pass fwd: RMSNorm, or none: the gate alone
 *   gate-for     feature, norm           pass fwd: whether z has an element for each feature, or
 *                                        one for each norm
 *   weights-for  norm, token             pass fwd: whether each norm of a token has its own part of
 *                                        w, or all have one
 *   frozen       no, yes                 pass bwd: whether the weights have no gradients
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x  input   T  [m, d]
 *   1  z  input   T  [m, d]
 *   2  w  input   T  [d]
 *   3  y  output  T  [m, d]
 * with groups: x, z, w, y
 *   0  x  input   T  [m, d * groups]
 *   1  z  input   T  [m, d * groups]
 *   2  w  input   T  [d * groups]
 *   3  y  output  T  [m, d * groups]
 * with z-row: x, z, w, y
 *   1  z  input  T  [m, z-row]
 * with norm=none: x, z, y
 * with gate-for=norm: x, z, w, y
 *   1  z  input  T  [m, 1]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  dy  input   T  [m, d]
 *   1  x   input   T  [m, d]
 *   2  z   input   T  [m, d]
 *   3  w   input   T  [d]
 *   4  dx  output  T  [m, d]
 *   5  dz  output  T  [m, d]
 *   6  dw  output  T  [d]
 * with groups: dy, x, z, w, dx, dz, dw
 *   0  dy  input   T  [m, d * groups]
 *   1  x   input   T  [m, d * groups]
 *   2  z   input   T  [m, d * groups]
 *   3  w   input   T  [d * groups]
 *   4  dx  output  T  [m, d * groups]
 *   5  dz  output  T  [m, d * groups]
 *   6  dw  output  T  [d * groups]
 * with z-row: dy, x, z, w, dx, dz, dw
 *   2  z  input  T  [m, z-row]
 * with frozen=yes: dy, x, z, w, dx, dz */

/* gated-delta-rule: linear attention with a state that decays, erases and writes: S = S exp(g), S
 *   += beta (v - S k) k^T, out = scale * S q
 *
 *   s              1 to 16777216               tokens of a sequence; in layout thd of all sequences
 *                                              together (any number)
 *   b              1 to 65536                  sequences
 *   heads          1 to 1024                   heads of q and k
 *   dim            1 to 256                    features of a head of q and k
 *   v-dim          1 to 256                    features of a head of v
 *   v-heads        1 to 1024, rare             heads of v, a multiple of those of q and k; as many
 *                                              if left out
 *   states         1 to 16777216, rare         entries of the cache of states; b + 1 if left out
 *   state-block    1 to 17179869184, rare      elements from an entry of the cache to the next;
 *                                              v-heads * v-dim * dim if left out
 *   slots          1 to 64, rare               entries of a sequence, one behind each token, for
 *                                              the verification of drafts: state_indices is [b,
 *                                              slots], and accepted, i32 [b] behind it, tells the
 *                                              tokens that were kept; without it one entry
 *   q-row          1 to 17179869184, rare      stride of q between tokens, in elements, for a part
 *                                              of a packed row; heads * dim if left out
 *   k-row          1 to 17179869184, rare      as q-row, for k
 *   v-row          1 to 17179869184, rare      as q-row, for v; v-heads * v-dim if left out
 *   gate-row       1 to 17179869184, rare      as q-row, for beta or beta_logits, and for g or a of
 *                                              decay=head; heads * gate-block if left out
 *   gate-block     1 to 1024, rare             in these, elements from the first value head of a
 *                                              head of k to that of the next; v-heads / heads if
 *                                              left out
 *   layout         bshd, thd                   order of the tokens: [b, s, ..], or packed sequences
 *   gate           log, softplus, bounded      the log of the decay g, or its input a for
 *                                              -exp(A_log) softplus(a + dt_bias), or for gate-bound
 *                                              * sigmoid(exp(A_log) (a + dt_bias))
 *   decay          head, channel               decays of a value head: one, or one for each feature
 *                                              of k
 *   beta           given, sigmoid              beta itself, or beta-scale * sigmoid(beta_logits)
 *   qk-norm        none, l2                    whether q and k are divided by their l2 norm
 *   initial-state  no, yes                     whether sequences begin with a state
 *   final-state    no, yes                     whether the state behind the last token is written,
 *                                              or in pass bwd has a gradient
 *   indices        no, yes                     whether states are entries of a cache, updated in
 *                                              place, by an index of each sequence
 *   has-state      no, yes                     whether a byte of each sequence tells that it begins
 *                                              with its state, otherwise with zeros
 *   state-dtype    f32, bf16                   dtype of states
 *   state-layout   vk, kv                      states [v-dim, dim] or [dim, v-dim]
 *   scale          a number from 0 to 1000000  factor of out; 0: 1 / sqrt(dim)
 *   beta-scale     a number from 0 to 2        factor of beta=sigmoid, 2 for negative eigenvalues
 *   gate-bound     a number from -100 to 0     the least g of gate=bounded
 *   null-index     a number from -1 to 0       an index of at most this is padding: 0, or -1
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  q     input   T    [b, s, heads, dim]
 *   1  k     input   T    [b, s, heads, dim]
 *   2  v     input   T    [b, s, heads, v-dim]
 *   3  g     input   f32  [b, s, heads]
 *   4  beta  input   f32  [b, s, heads]
 *   5  out   output  T    [b, s, heads, v-dim]
 * with v-heads: q, k, v, g, beta, out
 *   2  v     input   T    [b, s, v-heads, v-dim]
 *   3  g     input   f32  [b, s, v-heads]
 *   4  beta  input   f32  [b, s, v-heads]
 *   5  out   output  T    [b, s, v-heads, v-dim]
 * with q-row: q, k, v, g, beta, out
 *   0  q  input  T  [b, s, q-row]
 * with k-row: q, k, v, g, beta, out
 *   1  k  input  T  [b, s, k-row]
 * with v-row: q, k, v, g, beta, out
 *   2  v  input  T  [b, s, v-row]
 * with gate-row: q, k, v, g, beta, out
 *   3  g     input  f32  [b, s, gate-row]
 *   4  beta  input  f32  [b, s, gate-row]
 * with gate-block: q, k, v, g, beta, out
 *   3  g     input  f32  [b, s, gate-block * heads]
 *   4  beta  input  f32  [b, s, gate-block * heads]
 * with layout=thd: q, k, v, g, beta, offsets, out
 *   0  q        input   T    [s, heads, dim]
 *   1  k        input   T    [s, heads, dim]
 *   2  v        input   T    [s, heads, v-dim]
 *   3  g        input   f32  [s, heads]
 *   4  beta     input   f32  [s, heads]
 *   5  offsets  input   i32  [b + 1]
 *   6  out      output  T    [s, heads, v-dim]
 * with gate=softplus: q, k, v, a, A_log, dt_bias, beta, out
 *   3  a        input  T    [b, s, heads]
 *   4  A_log    input  f32  [heads]
 *   5  dt_bias  input  f32  [heads]
 * with gate=bounded: q, k, v, a, A_log, dt_bias, beta, out
 *   3  a        input  T    [b, s, heads]
 *   4  A_log    input  f32  [heads]
 *   5  dt_bias  input  f32  [heads]
 * with decay=channel: q, k, v, g, beta, out
 *   3  g  input  f32  [b, s, heads, dim]
 * with beta=sigmoid: q, k, v, g, beta_logits, out
 *   4  beta_logits  input  T  [b, s, heads]
 * with initial-state=yes: q, k, v, g, beta, initial_state, out
 *   5  initial_state  input  f32  [b, heads, v-dim, dim]
 * with final-state=yes: q, k, v, g, beta, out, final_state
 *   6  final_state  output  f32  [b, heads, v-dim, dim]
 * with indices=yes: q, k, v, g, beta, states, state_indices, out
 *   5  states         updated  f32  [b + 1, heads, v-dim, dim]
 *   6  state_indices  input    i32  [b]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0   d_out  input   T    [b, s, heads, v-dim]
 *   1   q      input   T    [b, s, heads, dim]
 *   2   k      input   T    [b, s, heads, dim]
 *   3   v      input   T    [b, s, heads, v-dim]
 *   4   g      input   f32  [b, s, heads]
 *   5   beta   input   f32  [b, s, heads]
 *   6   dq     output  T    [b, s, heads, dim]
 *   7   dk     output  T    [b, s, heads, dim]
 *   8   dv     output  T    [b, s, heads, v-dim]
 *   9   dg     output  f32  [b, s, heads]
 *   10  dbeta  output  f32  [b, s, heads]
 * with v-heads: d_out, q, k, v, g, beta, dq, dk, dv, dg, dbeta
 *   0   d_out  input   T    [b, s, v-heads, v-dim]
 *   3   v      input   T    [b, s, v-heads, v-dim]
 *   4   g      input   f32  [b, s, v-heads]
 *   5   beta   input   f32  [b, s, v-heads]
 *   8   dv     output  T    [b, s, v-heads, v-dim]
 *   9   dg     output  f32  [b, s, v-heads]
 *   10  dbeta  output  f32  [b, s, v-heads]
 * with q-row: d_out, q, k, v, g, beta, dq, dk, dv, dg, dbeta
 *   1  q  input  T  [b, s, q-row]
 * with k-row: d_out, q, k, v, g, beta, dq, dk, dv, dg, dbeta
 *   2  k  input  T  [b, s, k-row]
 * with v-row: d_out, q, k, v, g, beta, dq, dk, dv, dg, dbeta
 *   3  v  input  T  [b, s, v-row]
 * with gate-row: d_out, q, k, v, g, beta, dq, dk, dv, dg, dbeta
 *   4  g     input  f32  [b, s, gate-row]
 *   5  beta  input  f32  [b, s, gate-row]
 * with gate-block: d_out, q, k, v, g, beta, dq, dk, dv, dg, dbeta
 *   4  g     input  f32  [b, s, gate-block * heads]
 *   5  beta  input  f32  [b, s, gate-block * heads]
 * with layout=thd: d_out, q, k, v, g, beta, offsets, dq, dk, dv, dg, dbeta
 *   0   d_out    input   T    [s, heads, v-dim]
 *   1   q        input   T    [s, heads, dim]
 *   2   k        input   T    [s, heads, dim]
 *   3   v        input   T    [s, heads, v-dim]
 *   4   g        input   f32  [s, heads]
 *   5   beta     input   f32  [s, heads]
 *   6   offsets  input   i32  [b + 1]
 *   7   dq       output  T    [s, heads, dim]
 *   8   dk       output  T    [s, heads, dim]
 *   9   dv       output  T    [s, heads, v-dim]
 *   10  dg       output  f32  [s, heads]
 *   11  dbeta    output  f32  [s, heads]
 * with gate=softplus: d_out, q, k, v, a, A_log, dt_bias, beta, dq, dk, dv, da, dA_log, ddt_bias,
 *   dbeta
 *   4   a         input   T    [b, s, heads]
 *   5   A_log     input   f32  [heads]
 *   6   dt_bias   input   f32  [heads]
 *   11  da        output  T    [b, s, heads]
 *   12  dA_log    output  f32  [heads]
 *   13  ddt_bias  output  f32  [heads]
 * with gate=bounded: d_out, q, k, v, a, A_log, dt_bias, beta, dq, dk, dv, da, dA_log, ddt_bias,
 *   dbeta
 *   4   a         input   T    [b, s, heads]
 *   5   A_log     input   f32  [heads]
 *   6   dt_bias   input   f32  [heads]
 *   11  da        output  T    [b, s, heads]
 *   12  dA_log    output  f32  [heads]
 *   13  ddt_bias  output  f32  [heads]
 * with decay=channel: d_out, q, k, v, g, beta, dq, dk, dv, dg, dbeta
 *   4  g   input   f32  [b, s, heads, dim]
 *   9  dg  output  f32  [b, s, heads, dim]
 * with beta=sigmoid: d_out, q, k, v, g, beta_logits, dq, dk, dv, dg, dbeta_logits
 *   5   beta_logits   input   T  [b, s, heads]
 *   10  dbeta_logits  output  T  [b, s, heads]
 * with initial-state=yes: d_out, q, k, v, g, beta, initial_state, dq, dk, dv, dg, dbeta,
 *   d_initial_state
 *   6   initial_state    input   f32  [b, heads, v-dim, dim]
 *   12  d_initial_state  output  f32  [b, heads, v-dim, dim]
 * with final-state=yes: d_out, d_final_state, q, k, v, g, beta, dq, dk, dv, dg, dbeta
 *   1  d_final_state  input  f32  [b, heads, v-dim, dim] */

/* ssd: state space duality, the core of Mamba-2: S = exp(dt A) S + dt x B^T, out = S C + D x
 *
 *   s              1 to 16777216               tokens of a sequence; in layout thd of all sequences
 *                                              together (any number)
 *   b              1 to 65536                  sequences
 *   heads          1 to 1024                   heads of x
 *   dim            1 to 256                    features of a head of x
 *   state-dim      1 to 256                    features of a group of B and C
 *   groups         1 to 1024, rare             groups of heads that share B and C; 1 if left out
 *   states         1 to 16777216, rare         entries of the cache of states; b + 1 if left out
 *   state-block    1 to 17179869184, rare      elements from an entry of the cache to the next;
 *                                              heads * dim * state-dim if left out
 *   slots          1 to 64, rare               entries of a sequence, one behind each token, for
 *                                              the verification of drafts: state_indices is [b,
 *                                              slots], and accepted, i32 [b] behind it, tells the
 *                                              tokens that were kept; without it one entry
 *   x-row          1 to 17179869184, rare      stride of x between tokens, in elements, for a part
 *                                              of a packed row; heads * dim if left out
 *   b-row          1 to 17179869184, rare      as x-row, for B; groups * state-dim if left out
 *   c-row          1 to 17179869184, rare      as b-row, for C
 *   dt-row         1 to 17179869184, rare      as x-row, for dt; heads if left out
 *   layout         bshd, thd                   order of the tokens: [b, s, ..], or packed sequences
 *   decay          log, given                  A_log, for A = -exp(A_log), or A itself
 *   softplus       yes, no                     whether dt is the softplus of its input
 *   dt-bias        no, yes                     whether dt_bias is added to dt first
 *   skip           no, yes                     whether D x is added to out
 *   initial-state  no, yes                     whether sequences begin with a state
 *   final-state    no, yes                     whether the state behind the last token is written,
 *                                              or in pass bwd has a gradient
 *   indices        no, yes                     whether states are entries of a cache, updated in
 *                                              place, by an index of each sequence
 *   has-state      no, yes                     whether a byte of each sequence tells that it begins
 *                                              with its state, otherwise with zeros
 *   state-dtype    f32, bf16                   dtype of states
 *   dt-min         a number from 0 to 1000000  the least dt
 *   dt-max         a number from 0 to 1000000  the largest dt; 0: no limit
 *   null-index     a number from -1 to 0       an index of at most this is padding: 0, or -1
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x      input   T    [b, s, heads, dim]
 *   1  dt     input   T    [b, s, heads]
 *   2  A_log  input   f32  [heads]
 *   3  B      input   T    [b, s, 1, state-dim]
 *   4  C      input   T    [b, s, 1, state-dim]
 *   5  out    output  T    [b, s, heads, dim]
 * with groups: x, dt, A_log, B, C, out
 *   3  B  input  T  [b, s, groups, state-dim]
 *   4  C  input  T  [b, s, groups, state-dim]
 * with x-row: x, dt, A_log, B, C, out
 *   0  x  input  T  [b, s, x-row]
 * with b-row: x, dt, A_log, B, C, out
 *   3  B  input  T  [b, s, b-row]
 * with c-row: x, dt, A_log, B, C, out
 *   4  C  input  T  [b, s, c-row]
 * with dt-row: x, dt, A_log, B, C, out
 *   1  dt  input  T  [b, s, dt-row]
 * with layout=thd: x, dt, A_log, B, C, offsets, out
 *   0  x        input   T    [s, heads, dim]
 *   1  dt       input   T    [s, heads]
 *   3  B        input   T    [s, 1, state-dim]
 *   4  C        input   T    [s, 1, state-dim]
 *   5  offsets  input   i32  [b + 1]
 *   6  out      output  T    [s, heads, dim]
 * with decay=given: x, dt, A, B, C, out
 *   2  A  input  f32  [heads]
 * with dt-bias=yes: x, dt, A_log, B, C, dt_bias, out
 *   5  dt_bias  input  f32  [heads]
 * with skip=yes: x, dt, A_log, B, C, D, out
 *   5  D  input  f32  [heads]
 * with initial-state=yes: x, dt, A_log, B, C, initial_state, out
 *   5  initial_state  input  f32  [b, heads, dim, state-dim]
 * with final-state=yes: x, dt, A_log, B, C, out, final_state
 *   6  final_state  output  f32  [b, heads, dim, state-dim]
 * with indices=yes: x, dt, A_log, B, C, states, state_indices, out
 *   5  states         updated  f32  [b + 1, heads, dim, state-dim]
 *   6  state_indices  input    i32  [b]
 *
 * Pass bwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0   d_out   input   T    [b, s, heads, dim]
 *   1   x       input   T    [b, s, heads, dim]
 *   2   dt      input   T    [b, s, heads]
 *   3   A_log   input   f32  [heads]
 *   4   B       input   T    [b, s, 1, state-dim]
 *   5   C       input   T    [b, s, 1, state-dim]
 *   6   dx      output  T    [b, s, heads, dim]
 *   7   ddt     output  T    [b, s, heads]
 *   8   dA_log  output  f32  [heads]
 *   9   dB      output  T    [b, s, 1, state-dim]
 *   10  dC      output  T    [b, s, 1, state-dim]
 * with groups: d_out, x, dt, A_log, B, C, dx, ddt, dA_log, dB, dC
 *   4   B   input   T  [b, s, groups, state-dim]
 *   5   C   input   T  [b, s, groups, state-dim]
 *   9   dB  output  T  [b, s, groups, state-dim]
 *   10  dC  output  T  [b, s, groups, state-dim]
 * with x-row: d_out, x, dt, A_log, B, C, dx, ddt, dA_log, dB, dC
 *   1  x  input  T  [b, s, x-row]
 * with b-row: d_out, x, dt, A_log, B, C, dx, ddt, dA_log, dB, dC
 *   4  B  input  T  [b, s, b-row]
 * with c-row: d_out, x, dt, A_log, B, C, dx, ddt, dA_log, dB, dC
 *   5  C  input  T  [b, s, c-row]
 * with dt-row: d_out, x, dt, A_log, B, C, dx, ddt, dA_log, dB, dC
 *   2  dt  input  T  [b, s, dt-row]
 * with layout=thd: d_out, x, dt, A_log, B, C, offsets, dx, ddt, dA_log, dB, dC
 *   0   d_out    input   T    [s, heads, dim]
 *   1   x        input   T    [s, heads, dim]
 *   2   dt       input   T    [s, heads]
 *   4   B        input   T    [s, 1, state-dim]
 *   5   C        input   T    [s, 1, state-dim]
 *   6   offsets  input   i32  [b + 1]
 *   7   dx       output  T    [s, heads, dim]
 *   8   ddt      output  T    [s, heads]
 *   10  dB       output  T    [s, 1, state-dim]
 *   11  dC       output  T    [s, 1, state-dim]
 * with decay=given: d_out, x, dt, A, B, C, dx, ddt, dA, dB, dC
 *   3  A   input   f32  [heads]
 *   8  dA  output  f32  [heads]
 * with dt-bias=yes: d_out, x, dt, A_log, B, C, dt_bias, dx, ddt, dA_log, dB, dC, ddt_bias
 *   6   dt_bias   input   f32  [heads]
 *   12  ddt_bias  output  f32  [heads]
 * with skip=yes: d_out, x, dt, A_log, B, C, D, dx, ddt, dA_log, dB, dC, dD
 *   6   D   input   f32  [heads]
 *   12  dD  output  f32  [heads]
 * with initial-state=yes: d_out, x, dt, A_log, B, C, initial_state, dx, ddt, dA_log, dB, dC,
 *   d_initial_state
 *   6   initial_state    input   f32  [b, heads, dim, state-dim]
 *   12  d_initial_state  output  f32  [b, heads, dim, state-dim]
 * with final-state=yes: d_out, d_final_state, x, dt, A_log, B, C, dx, ddt, dA_log, dB, dC
 *   1  d_final_state  input  f32  [b, heads, dim, state-dim] */

/* indexer: choice of keys of sparse attention: the best of sum_h weights_h relu(q_h k) for each
 *   query
 *
 *   b            1 to 65535              sequences (any number)
 *   s            1 to 16777216           queries of a sequence, its last
 *   kv           1 to 16777216           keys of a sequence, with lengths=yes at most
 *   heads        1 to 256                indexer heads
 *   dim          1 to 512                features of a head
 *   top          1 to 65536, rare        keys that are chosen for a query; 2048 if left out
 *   page         1 to 16777216, rare     keys of a page; a page id out of range reads zeros;
 *                                        contiguous if left out
 *   pages        1 to 16777216, rare     pages in memory; as many as the sequences need if left
 *                                        out. With fewer and lengths=yes, test data have shorter
 *                                        sequences
 *   k-block      1 to 17179869184, rare  elements of k from a page, or a sequence, to the next;
 *                                        those of its keys if left out
 *   scale-block  1 to 17179869184, rare  scales from a page, or a sequence, to the next; those of
 *                                        its keys if left out
 *   lengths      no, yes                 whether each sequence has its own number of keys, of kv at
 *                                        most
 *   k-format     same, e4m3              element type of k: that of q, or e4m3 with an f32 scale
 *                                        for each key
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  q        input   T    [b, s, heads, dim]
 *   1  weights  input   f32  [b, s, heads]
 *   2  k        input   T    [b, kv, dim]
 *   3  ids      output  i32  [b, s, 2048]
 * with top: q, weights, k, ids
 *   3  ids  output  i32  [b, s, top]
 * with page: q, weights, k, pages, ids
 *   2  k      input  T    [b * ceil(kv / page), page, dim]
 *   3  pages  input  i32  [b, ceil(kv / page)]
 * with k-block: q, weights, k, ids
 *   2  k  input  T  [b, k-block]
 * with lengths=yes: q, weights, k, lengths, ids
 *   3  lengths  input  i32  [b]
 * with k-format=e4m3: q, weights, k, k_scale, ids
 *   2  k        input  fp8  [b, kv, dim]
 *   3  k_scale  input  f32  [b, kv] */

/* mla: latent attention over a cache: out = softmax(scale * [q_latent, q_rope] cache^T) latent
 *
 *   b         1 to 65536                  sequences (any number)
 *   s         1 to 65536                  queries of a sequence, its last
 *   kv        1 to 16777216               keys of a sequence, with lengths=yes at most
 *   heads     1 to 1024                   heads of queries
 *   rank      1 to 1024                   latent features of a row of the cache, its key and value
 *   rope      1 to 256, rare              rotated features behind them; none if left out
 *   page      1 to 16777216, rare         keys of a page of the cache; a page id out of range reads
 *                                         zeros; contiguous if left out
 *   pages     1 to 16777216, rare         pages in memory; as many as the sequences need if left
 *                                         out. With fewer and lengths=yes, test data have shorter
 *                                         sequences
 *   kv-row    1 to 17179869184, rare      elements of the cache from a key to the next; rank + rope
 *                                         if left out
 *   kv-block  1 to 17179869184, rare      elements of the cache from a page, or a sequence, to the
 *                                         next; those of its rows if left out
 *   top       1 to 16777216, rare         keys of a list that each query has: it sees no others,
 *                                         and entries that are no key, such as -1, count as none;
 *                                         no lists if left out
 *   lengths   no, yes                     whether each sequence has its own number of keys, of kv
 *                                         at most
 *   lse       no, yes                     whether the log of the sum of exponentials is written
 *   scale     a number from 0 to 1000000  factor of the scores; 0: 1 / sqrt(rank + rope)
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  q_latent  input   T  [b, s, heads, rank]
 *   1  cache     input   T  [b, kv, rank]
 *   2  out       output  T  [b, s, heads, rank]
 * with rope: q_latent, q_rope, cache, out
 *   1  q_rope  input  T  [b, s, heads, rope]
 *   2  cache   input  T  [b, kv, rank + rope]
 * with page: q_latent, cache, pages, out
 *   1  cache  input  T    [b * ceil(kv / page), page, rank]
 *   2  pages  input  i32  [b, ceil(kv / page)]
 * with kv-row: q_latent, cache, out
 *   1  cache  input  T  [b, kv, kv-row]
 * with kv-block: q_latent, cache, out
 *   1  cache  input  T  [b, kv-block]
 * with top: q_latent, cache, chosen, out
 *   2  chosen  input  i32  [b, s, top]
 * with lengths=yes: q_latent, cache, lengths, out
 *   2  lengths  input  i32  [b]
 * with lse=yes: q_latent, cache, out, lse
 *   3  lse  output  f32  [b, heads, s] */

/* mla-rope: in front of latent attention: RoPE of queries and key, norm of the latent, into a
 *   cache
 *
 *   m            1 to 2147483647                   tokens (any number)
 *   heads        1 to 1024                         heads of q
 *   nope         1 to 512                          features of a head of q that are not rotated
 *   rope         1 to 256                          features behind them, and of the key
 *   rank         1 to 1024                         latent features
 *   positions    1 to 2147483647, rare             rows of the table of angles; 4096 if left out
 *   cache-slots  1 to 2147483647, rare             rows of the cache; m if left out
 *   rotation     halves, interleaved, none         RoPE of q and of the key: pairs rope/2 apart,
 *                                                  neighbours, or none
 *   rope-order   same, halves                      neighbours that were rotated: where they were,
 *                                                  or the first of each pair before the second, as
 *                                                  in transformers' DeepSeek-V3
 *   eps          a number from 0 to 1              added to the norm's mean square
 *   angles       table, base, llama3, yarn         a table is given, or the rule by which
 *                                                  frequencies are computed
 *   base         a number from 1 to 1000000000000  base of the computed frequencies
 *   factor       a number from 0.001 to 1000000    factor by which the rule stretches positions
 *   context      a number from 1 to 1000000000     positions that the model was trained with
 *   low          a number from 0.001 to 1000000    llama3: context/low is the longest wavelength
 *                                                  that is interpolated
 *   high         a number from 0.001 to 1000000    llama3: context/high is the longest wavelength
 *                                                  that is left alone
 *   beta-fast    a number from 0.001 to 1000000    yarn: rotations in the context from which a pair
 *                                                  is left alone
 *   beta-slow    a number from 0.001 to 1000000    yarn: rotations in the context up to which a
 *                                                  pair is stretched
 *   scale        a number from 0 to 1000000        factor of all sines and cosines; 0: the rule's
 *                                                  own
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  q          input    T    [m, heads, nope + rope]
 *   1  kv         input    T    [m, rank + rope]
 *   2  norm       input    T    [rank]
 *   3  positions  input    i32  [m]
 *   4  angles     input    f32  [4096, rope]
 *   5  cache      updated  T    [m, rank + rope]
 *   6  slots      input    i32  [m]
 *   7  q_rope     output   T    [m, heads, rope]
 * with positions: q, kv, norm, positions, angles, cache, slots, q_rope
 *   4  angles  input  f32  [positions, rope]
 * with cache-slots: q, kv, norm, positions, angles, cache, slots, q_rope
 *   5  cache  updated  T  [cache-slots, rank + rope]
 * with rotation=none: q, kv, norm, cache, slots, q_rope
 * with angles=base: q, kv, norm, positions, cache, slots, q_rope
 * with angles=llama3: q, kv, norm, positions, cache, slots, q_rope
 * with angles=yarn: q, kv, norm, positions, cache, slots, q_rope */

/* head-linear: a product for each head: y[h] = x[h] w[h]^T, as around latent attention
 *
 *   m       1 to 2147483647      tokens (any number)
 *   heads   1 to 1024            heads
 *   n       1 to 1024            features of a head of y
 *   k       1 to 1024            features of a head of x
 *   x-head  1 to 16777216, rare  elements from a head of x to the next, of which the first k are
 *                                read; k if left out
 *   w-rows  1 to 16777216, rare  rows of a head in w; those of a product, and those before them, if
 *                                left out
 *   w-skip  1 to 16777216, rare  rows of a head in w before those of the product; none if left out
 *   layout  nk, kn               a head's weight: [n, k], or its transpose [k, n]
 *
 * Pass fwd: dtype bf16, fp16, f32 on CUDA; f32, bf16 on the CPU
 *   0  x  input   T  [m, heads, k]
 *   1  w  input   T  [heads, n, k]
 *   2  y  output  T  [m, heads, n]
 * with x-head: x, w, y
 *   0  x  input  T  [m, heads, x-head]
 * with w-rows: x, w, y
 *   1  w  input  T  [heads, w-rows, k]
 * with w-skip: x, w, y
 *   1  w  input  T  [heads, n + w-skip, k]
 * with layout=kn: x, w, y
 *   1  w  input  T  [heads, k, n] */

#endif
