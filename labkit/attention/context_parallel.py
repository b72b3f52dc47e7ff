"""Context parallelism: attention over a sequence that is sharded over ranks.

    zig-zag, n = 2    tokens   [0  1][2  3][4  5][6  7]      a late token sees more keys than an
                      rank     [ 0  ][ 1  ][ 1  ][ 0  ]      early one, so each rank gets both

    ring    rank 0   own keys  | keys of rank 1 |      all-to-all   heads  0 1      heads  0  1
            rank 1   own keys  | keys of rank 0 |      rank 0 has   [T/n tokens] -> [T][  ]
            network  [ to the next rank ]              rank 1       [T/n tokens]    [  ][T]

Ring: keys and values travel around the ring. Each rank computes its queries' tiles with the keys
that it has, while the next keys arrive. All-to-all: each rank gets all tokens of some heads, and
attention is unchanged. All-gather: each rank gets all keys and values first, and computes its own
queries. All three use the tokens of `places`.

Sent per rank, for K bytes of its keys and values: forward (n-1) K and backward (2n-1) K in the
ring; all-gather (n-1) K in each; all-to-all (n-1)/n of query, keys, values and output, twice. Held
for backward: 1/n of one process; in the ring also keys and gradients in flight; all-gather: all
keys and values. Liu, Zaharia and Abbeel, Ring Attention, ICLR 2024, section 3; Brandon et al.,
Striped Attention, 2023 (balance); Jacobs et al., DeepSpeed Ulysses, 2023, section 3; Grattafiori
et al., The Llama 3 Herd of Models, 2024, section 3.3.2 (all-gather).
"""

from contextlib import nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from labkit import comm
from labkit.attention.attention import FlashAttention
from labkit.attention.tiles import TILE, Tiles, by_key_head, checked_key_mask
from labkit.ideas.attention_and_context import merge
from labkit.tensor_parallel.rng_tracker import per_rank_draws


def places(length, group=None):
    """Return the positions of this rank's tokens, [length / n]: two of 2n chunks, one per end.

    Raises ValueError if 2n does not divide the length.
    """
    return torch.cat([torch.arange(length)[chunk] for chunk in chunks_of_rank(length, group)])


def chunks_of_rank(length, group=None, rank=None):
    n = dist.get_world_size(group)
    rank = dist.get_rank(group) if rank is None else rank
    if length % (2 * n):
        raise ValueError(
            f"length={length} must be divisible by {2 * n}: two chunks for each of {n} ranks"
        )
    size = length // (2 * n)
    return [slice(i * size, (i + 1) * size) for i in zig_zag(rank, n)]


def order_of_ranks(length, group=None):
    """Return the positions of all tokens, [length]: those of rank 0, then those of rank 1 ..."""
    shares = [chunks_of_rank(length, group, rank) for rank in range(dist.get_world_size(group))]
    return torch.cat([torch.arange(length)[chunk] for share in shares for chunk in share])


def zig_zag(rank, n):
    """Return which two of 2n chunks a rank has; every rank has the same amount of work."""
    return rank, 2 * n - 1 - rank


def gather_key_masks(key_mask, group=None):
    """All-gather the key masks: [..., T/n] -> [n, ..., T/n], bool. Collective."""
    masks = key_mask.new_empty((dist.get_world_size(group), *key_mask.shape), dtype=torch.uint8)
    comm.all_gather(masks, key_mask.to(torch.uint8), group)
    return masks.bool()


def check_shapes(query, key, value):
    if not query.shape[-2:] == key.shape[-2:] == value.shape[-2:]:
        shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
        raise ValueError(f"query, key and value must have the same length and width: {shapes}")


def shared_seed(group=None):
    """Draw a seed for dropout on each rank; return rank 0's. Collective."""
    drawn = torch.randint(2**31, (1,)).to(comm.device(group))
    comm.broadcast(drawn, 0, group)
    return drawn.item()


def ring_attention(
    query,
    key,
    value,
    group=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    tile=TILE,
    window=None,
    key_mask=None,
):
    """Compute attention of this rank's queries over keys that travel around the ring. Collective.

    query: [B, H, T/n, d]; key, value: [B, G, T/n, d], at places(T); returns query's shape. If the
    tile divides T/2n, dropout draws what flash_attention draws for the full sequence; its seed is
    rank 0's.
    window, key_mask: as in flash_attention. The key_mask is this rank's, [B, T/n] at places(T), on
    all ranks or on none; one all-gather sends B T bytes. Chunks outside the window are not
    computed, but all keys still travel around the ring, because in zig-zag order the chunk before
    is on the rank before or after. Not supported: Striped Attention's order, a ring inside an
    all-to-all.
    Raises ValueError if shapes do not fit, or a rank has an odd number of tokens.
    """
    check_shapes(query, key, value)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    by_head = by_key_head(query, key, value)
    mask = checked_key_mask(key_mask, key)
    seed = shared_seed(group) if dropout_p else 0
    tiles = Tiles(is_causal, scale, tile, dropout_p, seed, window=window, key_mask=mask)
    return RingAttention.apply(*by_head, tiles, group).flatten(-4, -3)


class RingAttention(torch.autograd.Function):
    """Ring attention. forward: (query, key, value, Tiles, group) -> output."""

    @staticmethod
    def forward(ctx, query, key, value, tiles, group):
        ring = Ring(query.shape[-2], tiles, group)
        output = torch.zeros_like(query, dtype=torch.promote_types(query.dtype, torch.float32))
        log_sum = torch.full_like(output[..., :1], -torch.inf)
        for source, pair in ring.pass_round(torch.stack([key, value])):
            for rows, columns, part in ring.seen(source):
                result = part.forward(query[..., rows, :], *pair[..., columns, :])
                merged = merge(output[..., rows, :], log_sum[..., rows, :], *result)
                output[..., rows, :], log_sum[..., rows, :] = merged
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.ring = ring
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        query, key, value, output, log_sum = ctx.saved_tensors
        within = (gradient.to(log_sum.dtype) * output).sum(-1, keepdim=True)
        for_query = torch.zeros_like(log_sum.expand(query.shape))
        arrived = None
        for source, pair in ctx.ring.pass_round(torch.stack([key, value])):
            own = torch.zeros((2, *key.shape), dtype=log_sum.dtype, device=key.device)
            for rows, columns, part in ctx.ring.seen(source):
                q, *rest = (x[..., rows, :] for x in (query, log_sum, within))
                taken = (q, *pair[..., columns, :], *rest)
                gradients = part.backward(gradient[..., rows, :], *taken)
                for_query[..., rows, :] += gradients[0]
                own[0][..., columns, :] += gradients[1]
                own[1][..., columns, :] += gradients[2]
                del gradients  # otherwise they exist together with the next ones
            arrived = ctx.ring.send_on(own, arrived)
        return for_query.to(query.dtype), *arrived().to(key.dtype), None, None


class Ring:
    """A ring in which each rank sends tensors to the next one: keys n - 1 times, gradients n."""

    def __init__(self, length, tiles, group):
        self.rank = dist.get_rank(group)
        self.n = dist.get_world_size(group)
        self.half = length // 2
        self.tiles = tiles
        self.group = group
        if length % 2:
            raise ValueError(f"length={length} of a rank must be even, as it has two chunks")
        masked = tiles.key_mask is not None
        self.masks = gather_key_masks(tiles.key_mask, group) if masked else [None] * self.n

    def pass_round(self, pair):
        """Yield (source rank, keys and values) n times; meanwhile the next ones are received."""
        incoming = torch.empty_like(pair) if self.n > 1 else None
        for turn in range(self.n - 1):
            work = self.exchange(pair, incoming, async_op=True)
            yield (self.rank - turn) % self.n, pair
            work.wait()
            pair, incoming = incoming, pair
        yield (self.rank + 1) % self.n, pair

    def send_on(self, own, arrived):
        """Add the gradients that earlier ranks computed for these keys, and send the sum on.

        arrived: from the last call, or None. Returns a function that waits for the next gradients.
        """
        if arrived is not None:
            own += arrived()
        if self.n == 1:
            return lambda: own
        incoming = torch.empty_like(own)
        work = self.exchange(own, incoming, async_op=True)

        def next_arrived():
            work.wait()
            return incoming

        return next_arrived

    def exchange(self, outgoing, incoming, async_op=False):
        to = (self.rank + 1) % self.n
        source = (self.rank - 1) % self.n
        return comm.exchange(outgoing, to, incoming, source, self.group, async_op)

    def seen(self, source):
        """Yield (queries, keys, Tiles) for this rank's chunks and the source's."""
        halves = slice(0, self.half), slice(self.half, 2 * self.half)
        keys_of = zig_zag(source, self.n)
        mask = self.masks[source]
        for rows, query_chunk in zip(halves, zig_zag(self.rank, self.n), strict=True):
            for columns, key_chunk in zip(halves, keys_of, strict=True):
                part = replace(
                    self.tiles,
                    first_query=query_chunk * self.half,
                    first_key=key_chunk * self.half,
                    key_mask=None if mask is None else mask[..., columns],
                )
                if part.seen(slice(0, self.half), self.half):
                    yield rows, columns, part


def ulysses_attention(
    query, key, value, group=None, attend=F.scaled_dot_product_attention, key_mask=None, **options
):
    """Compute attention over all tokens for 1/n of the heads, by two all-to-alls. Collective.

    query: [B, H, T/n, d]; key, value: [B, G, T/n, d], at places(T); returns query's shape.
    attend: any attention function (query, key, value, **options) on tokens in sequence order. With
    dropout_p in options each rank draws its own mask, for its heads.
    key_mask: [B, T/n] bool at places(T), True for a real token, on all ranks or on none; attend
    gets key_mask=[B, T] after an all-gather of B T bytes. A window is one of the options. Both need
    an attend that supports them, such as labkit.attention.flash_attention.
    Raises ValueError if the heads are not divisible by the ranks, or attend supports no window or
    mask.
    """
    n = dist.get_world_size(group)
    masked = key_mask is not None
    if attend is F.scaled_dot_product_attention and (masked or "window" in options):
        raise ValueError("SDPA supports no window and no key_mask: pass attend=flash_attention")
    mask = checked_key_mask(key_mask, key)
    for heads in (query.shape[-3], key.shape[-3]):
        if heads % n:
            raise ValueError(f"{heads} heads must be divisible by {n} ranks")
    length = n * query.shape[-2]
    order = order_of_ranks(length, group)
    by_head = [Exchange.apply(x, -3, -2, group) for x in (query, key, value)]
    in_order = [x[..., order.argsort(), :] for x in by_head]  # [B, H/n, T, d]
    if masked:
        masks = gather_key_masks(mask, group)
        options["key_mask"] = torch.cat(tuple(masks), -1)[..., order.argsort()]  # [B, T]
    dropped = n > 1 and options.get("dropout_p")
    with per_rank_draws(dist.get_rank(group), query.device) if dropped else nullcontext():
        output = attend(*in_order, **options)
    return Exchange.apply(output[..., order, :], -2, -3, group)


class Exchange(torch.autograd.Function):
    """All-to-all: split along one dim, send part i to rank i, concatenate along another dim."""

    @staticmethod
    def forward(ctx, x, cut, join, group):
        ctx.cut = cut
        ctx.join = join
        ctx.group = group
        outgoing = torch.stack(x.chunk(dist.get_world_size(group), cut))
        incoming = torch.empty_like(outgoing)
        comm.all_to_all(incoming, outgoing, group=group)
        return torch.cat(tuple(incoming), join)

    @staticmethod
    def backward(ctx, gradient):
        return Exchange.apply(gradient, ctx.join, ctx.cut, ctx.group), None, None, None


def all_gather_attention(
    query,
    key,
    value,
    group=None,
    dropout_p=0.0,
    is_causal=False,
    scale=None,
    tile=TILE,
    window=None,
    key_mask=None,
):
    """Compute attention of this rank's queries over all keys, which are gathered first. Collective.

    query: [B, H, T/n, d]; key, value: [B, G, T/n, d], at places(T); returns query's shape.
    dropout_p, window, key_mask: as in ring_attention. Keys and values of all ranks are held until
    backward, which reduce-scatters their gradients. No message is hidden.
    Raises ValueError if shapes do not fit, or a rank has an odd number of tokens.
    """
    check_shapes(query, key, value)
    length = dist.get_world_size(group) * query.shape[-2]
    chunks = chunks_of_rank(length, group)
    in_order = order_of_ranks(length, group).argsort()
    mask = checked_key_mask(key_mask, key)
    if mask is not None:
        mask = torch.cat(tuple(gather_key_masks(mask, group)), -1)[..., in_order]  # [B, T]
    parts = Gather.apply(torch.stack([key, value]), group)
    keys, values = torch.cat(tuple(parts), -2)[..., in_order, :]  # [B, G, T, d] each
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    seed = shared_seed(group) if dropout_p else 0
    tiles = Tiles(is_causal, scale, tile, dropout_p, seed, window=window, key_mask=mask)
    outputs = []
    for chunk, queries in zip(chunks, query.chunk(2, -2), strict=True):
        of_chunk = replace(tiles, first_query=chunk.start)
        output = FlashAttention.apply(*by_key_head(queries, keys, values), of_chunk)
        outputs.append(output.flatten(-4, -3))
    return torch.cat(outputs, -2)


class Gather(torch.autograd.Function):
    """All-gather: [...] -> [n, ...]. Backward sums the gradients of a rank's part on that rank."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = x.new_empty((dist.get_world_size(group), *x.shape))
        comm.all_gather(parts, x, group=group)
        return parts

    @staticmethod
    def backward(ctx, gradient):
        own = torch.empty_like(gradient[0])
        comm.reduce_scatter(own, gradient.contiguous(), group=ctx.group)
        return own, None
