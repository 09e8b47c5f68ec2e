// Kernels that turn batched products into a mixture of experts, for comparison in `bench`: the row
// of each choice, and copies of the weights of the chosen experts.
//
// Grid of choice_places: (ceil(tokens · choices / 256)); of copy_slices: (ceil(elements of a slice
// / elements of 256 threads), slices, 65535 at most). Block: 256 threads.
#include "common/numerics.cuh"
#include "common/vectors.cuh"

namespace fftune {

// ids [tokens, weighted]. Writes two numbers for each choice [tokens, choices]: its expert, and its
// row among those of all products. Choices from `weighted` on are those of the shared experts,
// behind the `experts`. Rows are in the order of the choices if they are `gathered`, else that of
// the token among its expert's. An id without an expert has row -1.
template <int choices, int weighted, bool gathered>
__global__ void __launch_bounds__(256)
    choice_places(const int* ids, int* experts_of, int* places, int tokens, int experts) {
  const int choice = static_cast<int>(blockIdx.x) * 256 + static_cast<int>(threadIdx.x);
  if (choice >= tokens * choices) return;
  const int token = choice / choices, own = choice % choices;
  const bool is_shared = own >= weighted;
  const int id = is_shared ? experts + own - weighted : ids[token * weighted + own];
  const bool is_here = is_shared || (id >= 0 && id < experts);
  experts_of[choice] = is_here ? id : 0;
  places[choice] = !is_here ? -1 : gathered ? choice : id * tokens + token;
}

// to [slices, elements] = from [.., elements] at index[i], or without `index` at i / repeats.
// `Unit` is the type that a thread copies; `elements` counts units.
template <class Unit>
__global__ void __launch_bounds__(256) copy_slices(const Unit* from, const int* index, Unit* to,
                                                   int slices, int repeats, i64 elements) {
  const i64 element = static_cast<i64>(blockIdx.x) * 256 + threadIdx.x;
  if (element >= elements) return;
  for (int slice = blockIdx.y; slice < slices; slice += gridDim.y) {
    const int source = index != nullptr ? index[slice] : slice / repeats;
    to[slice * elements + element] = from[source * elements + element];
  }
}

}  // namespace fftune
