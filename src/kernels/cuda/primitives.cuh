#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace kvpool::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffU;

/// c += a . b, m16n8k16, fp32 accumulators.
template <class T>
__device__ __forceinline__ void mma16(float (&c)[4], std::uint32_t a0, std::uint32_t a1,
                                      std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                      std::uint32_t b1);
template <>
__device__ __forceinline__ void mma16<__half>(float (&c)[4], std::uint32_t a0, std::uint32_t a1,
                                              std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                              std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void mma16<__nv_bfloat16>(float (&c)[4], std::uint32_t a0,
                                                     std::uint32_t a1, std::uint32_t a2,
                                                     std::uint32_t a3, std::uint32_t b0,
                                                     std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

/// c += a . b, m16n8k32; a unsigned or signed bytes, b signed bytes.
template <bool kSigned>
__device__ __forceinline__ void mma32(int (&c)[4], std::uint32_t a0, std::uint32_t a1,
                                      std::uint32_t a2, std::uint32_t a3, std::uint32_t b0,
                                      std::uint32_t b1) {
  if constexpr (kSigned) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
        "{%0,%1,%2,%3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

/// Transposes an 8 x 8 matrix of 16-bit elements held as in an accumulator.
__device__ __forceinline__ std::uint32_t transpose8(std::uint32_t a) {
  std::uint32_t d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(d) : "r"(a));
  return d;
}

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
// These read what other instructions of the thread or, after a barrier, of others wrote: volatile
// with a clobber keeps the compiler from moving them over barriers.
__device__ __forceinline__ uint4 lds128(std::uint32_t a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(a)
               : "memory");
  return v;
}
__device__ __forceinline__ uint2 lds64(std::uint32_t a) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "r"(a) : "memory");
  return v;
}
__device__ __forceinline__ std::uint32_t lds32(std::uint32_t a) {
  std::uint32_t v;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
// Of a table from address 1024 on, which does not change while it is read: free to move.
__device__ __forceinline__ uint4 table128(std::uint32_t offset) {
  uint4 v;
  asm("ld.shared.v4.u32 {%0,%1,%2,%3},[%4+1024];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "r"(offset));
  return v;
}
__device__ __forceinline__ uint2 table64(std::uint32_t offset) {
  uint2 v;
  asm("ld.shared.v2.u32 {%0,%1},[%2+1024];" : "=r"(v.x), "=r"(v.y) : "r"(offset));
  return v;
}
__device__ __forceinline__ std::uint32_t table32(std::uint32_t offset) {
  std::uint32_t v;
  asm("ld.shared.u32 %0,[%1+1024];" : "=r"(v) : "r"(offset));
  return v;
}
__device__ __forceinline__ void sts128(std::uint32_t a, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(a), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void sts64(std::uint32_t a, std::uint32_t x, std::uint32_t y) {
  asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(a), "r"(x), "r"(y) : "memory");
}

/// A line of memory to L1, by a load that nobody waits for.
__device__ __forceinline__ void touch(const void* at) {
  asm volatile("{.reg .u16 unused; ld.global.nc.u8 unused,[%0];}" ::"l"(at));
}
/// Lines of memory to L2, one a lane.
template <int kBytes>
__device__ __forceinline__ void send_for(const char* from, int lane) {
  static_assert(kBytes <= 32 * 128);
  if (lane * 128 < kBytes) asm volatile("prefetch.global.L2 [%0];" ::"l"(from + lane * 128));
}

/// 16 bytes to shared memory; zeros if `bytes` is 0.
__device__ __forceinline__ void copy16(std::uint32_t to, const void* from, int bytes = 16) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0],[%1],16,%2;" ::"r"(to), "l"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

template <class T>
__device__ __forceinline__ std::uint32_t pack16(float lo, float hi);
template <>
__device__ __forceinline__ std::uint32_t pack16<__half>(float lo, float hi) {
  const __half2 v = __floats2half2_rn(lo, hi);
  return *reinterpret_cast<const std::uint32_t*>(&v);
}
template <>
__device__ __forceinline__ std::uint32_t pack16<__nv_bfloat16>(float lo, float hi) {
  const __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
  return *reinterpret_cast<const std::uint32_t*>(&v);
}
template <class T>
__device__ __forceinline__ float round16(float x) {
  return static_cast<float>(static_cast<T>(x));
}

__device__ __forceinline__ __half2 as_half2(std::uint32_t v) {
  return *reinterpret_cast<const __half2*>(&v);
}
__device__ __forceinline__ std::uint32_t as_word(__half2 v) {
  return *reinterpret_cast<const std::uint32_t*>(&v);
}

}  // namespace kvpool::cuda
