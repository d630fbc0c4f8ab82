"""kvpool's C++ library."""

import collections
from collections.abc import Callable, Iterable, Sequence

import mlx.core


class PoolConfig:
    """
    Size and behaviour of a BlockPoolAllocator.

    Raises ValueError naming the field, its value and what is allowed.
    """

    def __init__(self, block_size: int = 16, n_blocks: int = 1024, separate_kv: bool = True, grow_on_exhaustion: bool = False, max_blocks: int | None = None) -> None: ...

    @property
    def block_size(self) -> int:
        """Token slots in one block."""

    @block_size.setter
    def block_size(self, arg: int, /) -> None: ...

    @property
    def n_blocks(self) -> int:
        """Blocks at the start, over all streams."""

    @n_blocks.setter
    def n_blocks(self, arg: int, /) -> None: ...

    @property
    def separate_kv(self) -> bool:
        """Whether keys and values draw from free lists of their own."""

    @separate_kv.setter
    def separate_kv(self, arg: bool, /) -> None: ...

    @property
    def grow_on_exhaustion(self) -> bool:
        """Whether a stream without enough free blocks grows instead of raising."""

    @grow_on_exhaustion.setter
    def grow_on_exhaustion(self, arg: bool, /) -> None: ...

    @property
    def max_blocks(self) -> int | None:
        """Blocks over all streams that growth may reach; None: no bound."""

    @max_blocks.setter
    def max_blocks(self, arg: int | None, /) -> None: ...

    def __eq__(self, arg: object, /) -> bool: ...

    def __repr__(self) -> str: ...

class AllocationStats:
    """
    Counters of a pool since it was made, in blocks unless noted. `pool.stats` is live; those of snapshot() and `pool.history` stay. Thread-safe.
    """

    def __init__(self, n_blocks: int, n_allocations: int = 0, n_frees: int = 0, n_reused: int = 0, n_exhausted: int = 0, n_grown: int = 0, n_retired: int = 0, peak_blocks_in_use: int = 0, _fragmented_count: int = 0) -> None: ...

    @property
    def n_blocks(self) -> int:
        """Blocks that the pool manages."""

    @property
    def n_allocations(self) -> int: ...

    @property
    def n_frees(self) -> int:
        """Blocks that went back to a free list."""

    @property
    def n_reused(self) -> int:
        """Allocations of a block that had been handed out before."""

    @property
    def n_exhausted(self) -> int:
        """Failed allocate() calls."""

    @property
    def n_grown(self) -> int: ...

    @property
    def n_retired(self) -> int: ...

    @property
    def peak_blocks_in_use(self) -> int: ...

    def blocks_in_use(self) -> int:
        """Blocks that some owner holds; a shared block counts once."""

    def fragmentation(self) -> float:
        """
        Fraction of the managed blocks that are in use and not full; 0.0 for a pool of none.
        """

    def snapshot(self) -> AllocationStats:
        """An independent copy."""

    def to_prometheus(self, prefix: str = 'veloxquant_block_pool') -> str:
        """
        Prometheus text exposition format 0.0.4, newline-terminated.

        Raises ValueError if `prefix` is no metric name.
        """

    def __eq__(self, arg: object, /) -> bool: ...

    def __repr__(self) -> str: ...

def render_prometheus(pools: dict[str, AllocationStats], prefix: str = 'kvpool_block_pool') -> str:
    """
    One page for several pools: each metric has one HELP and TYPE, and a sample a pool with the
    pool's name, escaped, as the label `pool`.
    """

class Block:
    """
    A handle to one block: who holds it is asked from the pool, live.

    It names the block and this holding of it; once freed it shows owner None and n_used 0, whoever got the block next. Keeps its pool alive. Thread-safe.
    """

    def __init__(self, block_id: int, stream: str = 'kv', format: str = 'fp16', n_used: int = 0, owner: int | None = None, ever_allocated: bool = False) -> None:
        """
        A handle that belongs to no pool, and equals another that shows the same.
        """

    @property
    def block_id(self) -> int: ...

    @property
    def stream(self) -> str:
        """'k', 'v', or 'kv' in a pool that does not separate them."""

    @property
    def format(self) -> str: ...

    @property
    def n_used(self) -> int:
        """Token slots in use; 0 once freed."""

    @property
    def owner(self) -> int | None:
        """Who holds the block through this handle; None once freed."""

    @property
    def ever_allocated(self) -> bool: ...

    @property
    def generation(self) -> int:
        """Differs between any two holdings of a pool."""

    @property
    def live(self) -> bool:
        """Whether this handle still holds its block."""

    def __eq__(self, arg: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class BlockPoolExhaustedError(RuntimeError):
    pass

class OwnerAlreadyActiveError(ValueError):
    pass

class BlockPoolAllocator:
    """
    Hands out fixed-size blocks of token slots to owners (requests) and takes them back.

    Every call either does all it says or raises and changes nothing but `n_exhausted`. A block
    can have several owners; it is free when the last one lets go. Free lists are LIFO.
    Thread-safe, every member. Holds no memory: see MLXBlockStorage.
    """

    def __init__(self, config: PoolConfig | None = None) -> None: ...

    @property
    def config(self) -> PoolConfig: ...

    @property
    def stats(self) -> AllocationStats:
        """Counters, live: they change with the pool."""

    @property
    def history(self) -> collections.deque[AllocationStats]:
        """
        Counters after each of the last 256 calls that changed some, oldest first.
        """

    def register_owner(self, owner: int) -> None:
        """
        Marks `owner` active.

        Raises OwnerAlreadyActiveError if it is registered or holds blocks.
        """

    def release_owner(self, owner: int) -> None:
        """
        Undoes register_owner(). Frees nothing: an owner that holds blocks stays active.
        """

    def new_owner(self) -> int:
        """An owner id that is not active and that no earlier call returned."""

    def allocate(self, stream: str, n_tokens: int, owner: int, format: str = 'fp16') -> list[Block]:
        """
        Takes blocks for `n_tokens` slots, all or none; registers `owner` if it is new.

        `stream` is 'k' or 'v', and ignored by a pool that does not separate them. Raises
        BlockPoolExhaustedError when too few blocks are free and growth cannot help, ValueError
        for `n_tokens` < 1 or another stream.
        """

    def allocate_kv(self, n_tokens: int, owner: int, format: str = 'fp16') -> tuple[list[Block], list[Block]]:
        """allocate() for keys and for values in one step: both or neither."""

    def share(self, blocks: Iterable[Block], owner: int) -> list[Block]:
        """
        Adds `owner` to the owners of live blocks; returns the handles through which it holds them.

        Raises ValueError if a handle is freed, stale or of another pool.
        """

    def free(self, blocks: Iterable[Block]) -> None:
        """
        Lets go of what these handles hold. What a handle has freed already counts nothing.

        Raises ValueError, freeing nothing, if a handle's block is held by others since, or is of another pool.
        """

    def free_all(self, owner: int) -> None:
        """
        Lets go of all that `owner` holds, and of the owner; an unknown owner is a no-op.
        """

    def blocks_for(self, owner: int) -> list[Block]:
        """What `owner` holds, in the order in which it got it."""

    def ref_count(self, block: Block) -> int:
        """Owners of the handle's block; 0 if the handle is freed."""

    def n_free(self, stream: str = 'k') -> int:
        """Free blocks of `stream`."""

    def shrink(self, stream: str, target_free: int) -> int:
        """
        Retires free blocks of `stream` for good until `target_free` are left; returns how many.

        Raises ValueError if `target_free` < 0.
        """

    def mark_used(self, block: Block, n_used: int) -> None:
        """
        Says how many slots of a block are in use. A freed handle is passed over.

        Raises ValueError if `n_used` is not in 0..block_size, or as free() does.
        """

    def __repr__(self) -> str: ...

class StaleBufferError(ValueError):
    pass

class MlxBuffer:
    """A handle to a buffer that an MlxBufferPool handed out. Thread-safe."""

    @property
    def byte_len(self) -> int:
        """Bytes asked for."""

    @property
    def dtype(self) -> mlx.core.Dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def capacity(self) -> int:
        """Bytes held."""

    @property
    def live(self) -> bool:
        """Whether the buffer is still this handle's."""

    @property
    def array(self) -> mlx.core.array:
        """
        An mx.array over the buffer, without a copy. While it or anything computed from it lazily is alive, the buffer is not handed out again.

        Raises StaleBufferError if the buffer was released, or the pool reset.
        """

    def __repr__(self) -> str: ...

class MlxBufferPool:
    """
    An arena of MLX buffers by power-of-two size, reused from step to step.

    A request takes the free buffer of its size class that was used last, or of the class above.
    Fresh memory is zero; a reused buffer shows what was there. Free buffers are kept up to
    `max_free_bytes`; those unused for longest go first. Thread-safe.
    """

    def __init__(self, max_free_bytes: int = 1073741824) -> None: ...

    def alloc(self, device: mlx.core.Device, byte_len: int, dtype: mlx.core.Dtype, shape: Sequence[int]) -> MlxBuffer:
        """
        A buffer of at least `byte_len` bytes; its array has `shape` and `dtype`.

        Raises ValueError if the shape does not fit `byte_len`.
        """

    def alloc_batch(self, device: mlx.core.Device, requests: Sequence[tuple[int, mlx.core.Dtype, Sequence[int]]]) -> list[MlxBuffer]:
        """
        alloc() for a whole step's (byte_len, dtype, shape): all buffers, or an exception and none.
        """

    def release(self, buffer: MlxBuffer) -> None:
        """
        Gives one buffer back; twice is a no-op.

        Raises StaleBufferError if the buffer was handed on since or the pool was reset, ValueError if it is of another pool.
        """

    def reset(self) -> None:
        """
        Gives back all buffers that are out. Their handles are stale from here on.
        """

    def clear(self) -> None:
        """Returns the memory of the free buffers to MLX."""

    def free_count(self) -> int: ...

    def free_bytes(self) -> int: ...

    def in_use_count(self) -> int: ...

    def created_bytes(self) -> int:
        """Bytes of all buffers ever made."""

    @property
    def max_free_bytes(self) -> int: ...

class MLXBlockStorage:
    """
    The memory behind the blocks of a BlockPoolAllocator.

    A block's memory is taken at first use, in the block's format (fp32, fp16, bf16, or codes int1
    to int8, bit-packed), and does not move while the block lives. Rows that were not written in
    the block's present life are zero. Reads and writes are lazy and happen in the order asked
    for. Thread-safe.

    Arrays have a first axis for heads when n_kv_heads > 1. Every call on a block raises
    ValueError if the block is freed, stale or of another pool, or its format is not one of the
    above.
    """

    def __init__(self, pool: BlockPoolAllocator, head_dim: int, n_kv_heads: int = 1, buffers: MlxBufferPool | None = None) -> None: ...

    @property
    def pool(self) -> BlockPoolAllocator: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def n_kv_heads(self) -> int: ...

    def buffer_for(self, block: Block) -> mlx.core.array:
        """
        All rows as they lie: (block_size, head_dim) of the float type, or (block_size,
        ceil(head_dim * bits / 8)) of uint8, packed. A copy, which stays as it is.
        """

    def write(self, block: Block, offset: int, values: mlx.core.array) -> None:
        """
        Writes `values`, (n, head_dim), at slots `offset` to `offset + n`: floats, or integer
        codes of which the low bits count. Raises ValueError if they do not fit.
        """

    def read(self, block: Block) -> mlx.core.array:
        """The slots in use, (block.n_used, head_dim): floats, or codes as uint8."""

    def resident_bytes(self) -> int:
        """Bytes of all segments held."""

    def release(self, block: Block) -> None:
        """
        Gives back the memory of a freed block. Does nothing if the id was handed on since.

        Raises ValueError if the block is still held.
        """

class PoolBackedKVCacheCore:
    """
    What kvpool.PoolBackedKVCache keeps. Not thread-safe; the pool may be shared.
    """

    def __init__(self, pool: BlockPoolAllocator, owner: int = -1, step: int | None = None) -> None: ...

    @property
    def pool(self) -> BlockPoolAllocator: ...

    @property
    def owner(self) -> int: ...

    @property
    def step(self) -> int:
        """Tokens by which the buffers grow."""

    @property
    def offset(self) -> int:
        """Tokens a row."""

    def update_and_fetch(self, keys: mlx.core.array, values: mlx.core.array) -> tuple[mlx.core.array, mlx.core.array]:
        """
        Appends S tokens to each row and returns all: keys and values, (B, n_kv_heads, S,
        head_dim) to (B, n_kv_heads, offset, head_dim). Raises BlockPoolExhaustedError or
        ValueError and changes nothing, keys nor values.
        """

    def release(self) -> None:
        """
        Frees every block of the owner, and the memory of this cache and its siblings.
        """

    def size(self) -> int:
        """Tokens a row."""

    def empty(self) -> bool: ...

    def trim(self, n: int) -> int:
        """
        Forgets up to `n` of the last tokens; returns how many, 0 for a negative `n`.
        """

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers, at capacity."""

class VecInferStream:
    """
    How the keys, or the values, of all layers of a model are product-quantised.
    """

    def __init__(self, codes: mlx.core.array, centroids: mlx.core.array, scales: mlx.core.array, codebook_of: mlx.core.array, smooth: mlx.core.array, mean: mlx.core.array, rotation: mlx.core.array | None = None, hadamard: bool = True) -> None: ...

    @property
    def codes(self) -> mlx.core.array:
        """
        (n_codebooks, 2), int32: channels to a code (2, 4 or 8), and bits of a code (8; 12
        with 8 channels). The heads of a layer have one code; layers may differ.
        """

    @property
    def centroids(self) -> mlx.core.array:
        """
        int8: of each codebook in turn (2^bits, channels) numbers; centroid c of codebook i is
        scales[i] times row c of its numbers.
        """

    @property
    def scales(self) -> mlx.core.array:
        """(n_codebooks,), float32."""

    @property
    def codebook_of(self) -> mlx.core.array:
        """(n_layers, n_kv_heads), int32: the codebook of each head."""

    @property
    def smooth(self) -> mlx.core.array:
        """
        (n_layers, n_kv_heads, head_dim), float32: what is coded is (x - mean) / smooth,
        rotated; if there is no rotation, after a Hadamard transform.
        """

    @property
    def mean(self) -> mlx.core.array:
        """As smooth."""

    @property
    def rotation(self) -> mlx.core.array | None:
        """
        None or (n_layers, n_kv_heads, head_dim, head_dim), int8: rows that are made
        orthonormal, each in turn; element i of what is coded is the product with row i.
        """

    @property
    def hadamard(self) -> bool: ...

class VecInferCodebooks:
    """
    The codebooks of one model for one of the formats vecinfer1 to vecinfer4. Immutable.

    Raises ValueError naming the array that does not fit the others or the format.
    """

    def __init__(self, format: str, keys: VecInferStream, values: VecInferStream) -> None: ...

    @staticmethod
    def random(format: str, n_layers: int, n_kv_heads: int, head_dim: int, seed: int, rotates: bool = False) -> VecInferCodebooks:
        """
        Centroids drawn from a normal distribution, the same for the same seed: a cache works
        with them, but loses more than with trained ones. rotates: keys are rotated, at random,
        as those of trained sets.
        """

    @property
    def format(self) -> str: ...

    @property
    def n_layers(self) -> int: ...

    @property
    def n_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def average_bits(self) -> float:
        """Bits an element of keys and values, on average over the layers."""

    @property
    def nbytes(self) -> int:
        """Bytes of the centroids, scales and transforms as they are held."""

    @property
    def identity(self) -> int:
        """
        A hash of all that codes depend on: what one set coded, only an equal one decodes.
        """

class VecInferCalibration:
    """
    What calibration makes, and the error of coding what it learnt from: a layer's sum of
    squares of what is off over that of what is coded.
    """

    @property
    def keys(self) -> VecInferStream: ...

    @property
    def values(self) -> VecInferStream: ...

    @property
    def key_errors(self) -> list[float]:
        """One a layer."""

    @property
    def value_errors(self) -> list[float]:
        """One a layer."""

class VecInferCalibrator:
    """
    Makes the codebooks of a model from its keys, values and queries of a text.
    Not thread-safe.
    """

    def __init__(self, n_layers: int, max_tokens: int = 16384, sink: int = 16, window: int = 128, seed: int = 0) -> None:
        """
        Args:
            n_layers: layers of the model that keep keys and values.
            max_tokens: tokens of a layer that are kept to learn from; of more, an even
                choice.
            sink: first tokens of a sequence, from which nothing is learnt.
            window: newest tokens, which stay raw: attention on them does not count.
            seed: of every choice.

        Raises ValueError naming what is not allowed.
        """

    def observe(self, layer: int, queries: mlx.core.array, keys: mlx.core.array, values: mlx.core.array, scale: float) -> None:
        """
        Learns from one sequence, from its first token on. Evaluates the arrays.

        Args:
            queries: (B, n_heads, S, head_dim), after RoPE as the keys.
            keys, values: (B, n_kv_heads, S, head_dim).
            scale: factor of the scores.

        Raises ValueError naming what does not fit, NaN and infinity too; nothing is learnt
        then.
        """

    def observe_gradients(self, layer: int, gradients: mlx.core.array) -> None:
        """
        Learns what errors of a layer's output cost: `gradients` (any shape) are those of the
        log-likelihood of drawn tokens by attention's output, of the same text for all layers.
        Without any, layers count alike. Raises ValueError if they are not finite.
        """

    def train(self, format: str, n_codebooks: int = 0, n_restarts: int = 3, n_iterations: int = 20, progress: Callable[[int, int], None] | None = None) -> VecInferCalibration:
        """
        Trains the codebooks of a format: the same observations and seed give the same bits.

        Args:
            format: "vecinfer1", "vecinfer1.5", "vecinfer2", "vecinfer3" or
                "vecinfer4".
            n_codebooks: of the keys, and as many of the values, in all layers of the format's own
                code; 0: one a head, of codes of 1, 2 or 4 bits an element as serves the whole
                best within the format's bits.
            n_restarts: starts of k-means that are tried for each codebook.
            n_iterations: steps of k-means, at most.
            progress: called with steps done and in all; what it raises ends the
                training.

        Raises ValueError naming what is not allowed, RuntimeError if a layer has seen no
        token past the sink.
        """

def weight_sketch(weight: mlx.core.array, size: int) -> mlx.core.array:
    """
    Numbers that stand for a weight (out, in): weights that differ by a part of their length
    have sketches that differ by about that part of theirs. (size,), float32.
    """

class PagedStorage:
    """
    What the paged caches of all layers and requests share: the pool that counts their blocks and
    the memory that the blocks lie in. Its caches are used by one thread at a time, and handed over
    to another after mx.eval(cache.state).
    """

    def __init__(self, pool: BlockPoolAllocator, buffers: MlxBufferPool | None = None) -> None: ...

    @property
    def pool(self) -> BlockPoolAllocator: ...

    @property
    def level(self) -> str:
        """
        What runs the caches' ops: a level of kernels, or "ops", MLX's own on any device.
        Chosen for the device in use when this was made; KVPOOL_KERNELS forces one.
        """

    def resident_bytes(self) -> int:
        """Bytes held for blocks."""

    def recover(self) -> int:
        """
        After an evaluation has failed: evaluates all pending work, with NaN in place of
        keys, values and queries that cannot be computed, so that the other requests can go
        on. The request that gave them should be released, or trimmed to before them.
        Returns how many appends, attends and loads were given NaN.
        """

class PagedKVCacheConfig:
    """How a PagedKVCache stores tokens."""

    def __init__(self, key_format: str = 'raw', value_format: str = 'raw', group_size: int = 32, hadamard: bool = True, window: int = 128, sink: int = 16, sliding_window: int = 0, check_finite: bool = False, codebooks: VecInferCodebooks | None = None, layer: int = 0) -> None: ...

    @property
    def key_format(self) -> str: ...

    @property
    def value_format(self) -> str: ...

    @property
    def group_size(self) -> int:
        """Channels to a scale: 32 or 64."""

    @property
    def hadamard(self) -> bool: ...

    @property
    def window(self) -> int:
        """Newest tokens that stay raw."""

    @property
    def sink(self) -> int:
        """First tokens that stay raw."""

    @property
    def sliding_window(self) -> int:
        """If not 0: tokens that a query sees, itself among them."""

    @property
    def check_finite(self) -> bool:
        """
        Evaluate the tokens of each append, and refuse what a format other than raw cannot
        store: NaN, infinity and what is beyond fp16.
        """

    @property
    def codebooks(self) -> VecInferCodebooks:
        """What vecinfer formats need: codebooks of that format."""

    @property
    def layer(self) -> int:
        """The layer of the codebooks."""

    def __eq__(self, arg: object, /) -> bool: ...

class PagedKVCacheCore:
    """What the paged caches of kvpool keep. Not thread-safe."""

    def __init__(self, storage: PagedStorage, config: PagedKVCacheConfig, owners: Sequence[int]) -> None: ...

    def size(self) -> int:
        """Tokens of the longest row."""

    def is_trimmable(self) -> bool:
        """Whether no block was given back that slid out of reach."""

    @property
    def n_rows(self) -> int: ...

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks held; shared ones count for each holder."""

    @property
    def storage(self) -> PagedStorage: ...

    @property
    def config(self) -> PagedKVCacheConfig: ...

    @property
    def owners(self) -> list[int]: ...

class KVCache:
    """The keys and values of one head of one request, one vector at a time."""

    def append_key(self, k: mlx.core.array) -> None:
        """k: (d,)"""

    def append_value(self, v: mlx.core.array) -> None:
        """v: (d,)"""

    def append(self, k: mlx.core.array, v: mlx.core.array) -> None:
        """
        append_key() and append_value(): both or, where the cache can take a key back, neither.
        """

    def attend(self, q: mlx.core.array) -> mlx.core.array:
        """
        Attention of one query (d,) over all tokens, with scores divided by sqrt(d): (d,).
        """

    def memory_bytes(self) -> int:
        """Bytes that the stored tokens take."""

    def drop_last_key(self) -> bool:
        """
        Takes back the last key, which must have no value yet; False if this cache cannot.
        """

    def reset(self) -> None:
        """Forgets all tokens."""

    def __len__(self) -> int: ...

class PooledKVCache(KVCache):
    """
    A cache whose tokens are accounted for in a pool, whatever the cache inside stores and how.

    `inner` is a KVCache of this package or any object with append_key, append_value, attend,
    memory_bytes and reset (and drop_last_key() -> bool, if a failed append is to take its key
    back). A call that fails leaves pool and cache as they were. Blocks go back with release(),
    reset() or the cache. Not thread-safe; the pool may be shared.
    """

    def __init__(self, inner: object, pool: BlockPoolAllocator, owner: int = -1, format: str = 'fp16') -> None: ...

    def release(self) -> None:
        """Gives all blocks of this cache back. Tokens stay."""

    def n_blocks_held(self) -> int:
        """Blocks of keys and values together."""

    @property
    def owner(self) -> int: ...

    @property
    def inner(self) -> object: ...

    def __repr__(self) -> str: ...

class StandaloneKVCache(KVCache):
    """
    One head's tokens in paged blocks of its own, with any format: packed for real, attended where
    they lie. Vectors are kept as fp16 until they are encoded. attend() gives fp16.

    Raises ValueError naming the argument and what is allowed.
    """

    def __init__(self, head_dim: int, config: PagedKVCacheConfig, block_size: int = 32) -> None: ...

    @property
    def head_dim(self) -> int: ...

    def __repr__(self) -> str: ...

class KVCacheConfig:
    """What KVCacheFactory makes a cache from."""

    def __init__(self, method: str = 'kivi', head_dim: int = 128, bits: int = 2, group_size: int = 32, block_size: int = 32, window: int = 128, sink: int = 0, check_finite: bool = False, codebooks: VecInferCodebooks | None = None, random_codebooks: int | None = None) -> None: ...

    @property
    def method(self) -> str:
        """
        'fp16', 'int8', 'int4', 'int2', 'kivi4', 'kivi2', 'vecinfer1', 'vecinfer1.5', 'vecinfer2',
        'vecinfer3', 'vecinfer4'; 'int', 'kivi' and 'vecinfer' with `bits`.
        """

    @method.setter
    def method(self, arg: str, /) -> None: ...

    @property
    def head_dim(self) -> int: ...

    @head_dim.setter
    def head_dim(self, arg: int, /) -> None: ...

    @property
    def bits(self) -> int: ...

    @bits.setter
    def bits(self, arg: int, /) -> None: ...

    @property
    def group_size(self) -> int:
        """Channels to a scale: 32 or 64."""

    @group_size.setter
    def group_size(self, arg: int, /) -> None: ...

    @property
    def block_size(self) -> int:
        """Tokens a block: those that KIVI's keys share a scale with."""

    @block_size.setter
    def block_size(self, arg: int, /) -> None: ...

    @property
    def window(self) -> int:
        """Newest tokens that stay fp16."""

    @window.setter
    def window(self, arg: int, /) -> None: ...

    @property
    def sink(self) -> int:
        """First tokens that stay fp16."""

    @sink.setter
    def sink(self, arg: int, /) -> None: ...

    @property
    def check_finite(self) -> bool:
        """Evaluate each token and refuse what the method cannot store."""

    @check_finite.setter
    def check_finite(self, arg: bool, /) -> None: ...

    @property
    def codebooks(self) -> VecInferCodebooks:
        """Of vecinfer methods: codebooks of one KV head."""

    @property
    def random_codebooks(self) -> int | None:
        """If there are no codebooks: the seed of random ones, for tests."""

    @random_codebooks.setter
    def random_codebooks(self, arg: int | None, /) -> None: ...

    def __eq__(self, arg: object, /) -> bool: ...

class KVCacheFactory:
    @staticmethod
    def create(config: KVCacheConfig) -> KVCache:
        """Raises ValueError naming the field, its value and what is allowed."""

class KVCacheBuilder:
    """Sets the fields of a KVCacheConfig by name, then makes the cache."""

    def __init__(self) -> None: ...

    def with_method(self, method: str) -> KVCacheBuilder: ...

    def with_head_dim(self, head_dim: int) -> KVCacheBuilder: ...

    def with_bits(self, bits: int) -> KVCacheBuilder: ...

    def with_group_size(self, group_size: int) -> KVCacheBuilder: ...

    def with_block_size(self, block_size: int) -> KVCacheBuilder: ...

    def with_window(self, window: int) -> KVCacheBuilder: ...

    def with_sink(self, sink: int) -> KVCacheBuilder: ...

    def with_check_finite(self, check_finite: bool) -> KVCacheBuilder: ...

    def with_codebooks(self, codebooks: VecInferCodebooks) -> KVCacheBuilder:
        """Of one KV head, for vecinfer methods."""

    def with_random_codebooks(self, seed: int) -> KVCacheBuilder:
        """VecInferCodebooks.random(), for tests."""

    @property
    def config(self) -> KVCacheConfig: ...

    def build(self) -> KVCache:
        """As KVCacheFactory.create()."""

class VecInferBytes:
    """What VecInfer's codes of a cache's tokens come to, by arithmetic."""

    @property
    def compressed_key(self) -> int: ...

    @property
    def fp16_key(self) -> int: ...

    @property
    def compressed_value(self) -> int: ...

    @property
    def fp16_value(self) -> int: ...

    @property
    def codebooks(self) -> int: ...

    @property
    def assigned_avg_bits(self) -> float: ...

def vecinfer_bytes(cache: PagedKVCacheCore) -> VecInferBytes:
    """Raises ValueError if the cache's formats are not vecinfer ones."""

def vecinfer_cache_config(config: KVCacheConfig, n_kv_heads: int, layer: int = 0) -> PagedKVCacheConfig:
    """
    The formats, window, sink and codebooks of a KVCacheConfig as a paged cache takes them.
    """
