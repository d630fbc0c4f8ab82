#include "kvpool/vecinfer_codebooks.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings.h"

namespace kvpool::bindings {

using namespace nb::literals;
namespace mx = mlx::core;

void bind_vecinfer_codebooks(nb::module_& m) {
  nb::class_<VecInferStream>(
      m, "VecInferStream",
      "How the keys, or the values, of all layers of a model are product-quantised.")
      .def(
          "__init__",
          [](VecInferStream* self, mx::array codes, mx::array centroids, mx::array scales,
             mx::array codebook_of, mx::array smooth, mx::array mean,
             std::optional<mx::array> rotation, bool hadamard) {
            new (self) VecInferStream{std::move(codes),    std::move(centroids),
                                      std::move(scales),   std::move(codebook_of),
                                      std::move(smooth),   std::move(mean),
                                      std::move(rotation), hadamard};
          },
          "codes"_a, "centroids"_a, "scales"_a, "codebook_of"_a, "smooth"_a, "mean"_a,
          "rotation"_a.none() = nb::none(), "hadamard"_a = true)
      .def_ro("codes", &VecInferStream::codes,
              "(n_codebooks, 2), int32: channels to a code (2, 4 or 8), and bits of a code (8; 12\n"
              "with 8 channels). The heads of a layer have one code; layers may differ.")
      .def_ro("centroids", &VecInferStream::centroids,
              "int8: of each codebook in turn (2^bits, channels) numbers; centroid c of codebook i is\n"
              "scales[i] times row c of its numbers.")
      .def_ro("scales", &VecInferStream::scales, "(n_codebooks,), float32.")
      .def_ro("codebook_of", &VecInferStream::codebook_of,
              "(n_layers, n_kv_heads), int32: the codebook of each head.")
      .def_ro("smooth", &VecInferStream::smooth,
              "(n_layers, n_kv_heads, head_dim), float32: what is coded is (x - mean) / smooth,\n"
              "rotated; if there is no rotation, after a Hadamard transform.")
      .def_ro("mean", &VecInferStream::mean, "As smooth.")
      .def_ro("rotation", &VecInferStream::rotation,
              "None or (n_layers, n_kv_heads, head_dim, head_dim), int8: rows that are made\n"
              "orthonormal, each in turn; element i of what is coded is the product with row i.")
      .def_ro("hadamard", &VecInferStream::hadamard);

  nb::class_<VecInferCodebooks>(
      m, "VecInferCodebooks", nb::is_weak_referenceable(),
      "The codebooks of one model for one of the formats vecinfer1 to vecinfer4. Immutable.\n\n"
      "Raises ValueError naming the array that does not fit the others or the format.")
      .def(nb::init<std::string, const VecInferStream&, const VecInferStream&>(), "format"_a,
           "keys"_a, "values"_a)
      .def_static(
          "random", &VecInferCodebooks::random, "format"_a, "n_layers"_a, "n_kv_heads"_a,
          "head_dim"_a, "seed"_a, "rotates"_a = false,
          "Centroids drawn from a normal distribution, the same for the same seed: a cache works\n"
          "with them, but loses more than with trained ones. rotates: keys are rotated, at random,\n"
          "as those of trained sets.")
      .def_prop_ro("format", &VecInferCodebooks::format)
      .def_prop_ro("n_layers", &VecInferCodebooks::n_layers)
      .def_prop_ro("n_kv_heads", &VecInferCodebooks::n_kv_heads)
      .def_prop_ro("head_dim", &VecInferCodebooks::head_dim)
      .def_prop_ro("average_bits", &VecInferCodebooks::average_bits,
                   "Bits an element of keys and values, on average over the layers.")
      .def_prop_ro("nbytes", &VecInferCodebooks::nbytes,
                   "Bytes of the centroids, scales and transforms as they are held.")
      .def_prop_ro(
          "identity", &VecInferCodebooks::identity,
          "A hash of all that codes depend on: what one set coded, only an equal one decodes.");
}

}  // namespace kvpool::bindings
