"""Every kernel against float64 of the same inputs, or bit for bit against the reference on the CPU.

What the CPU promises is in spec/precision.toml. On a card two bounds are wider, by what its units are known to do:

- FP8 tensor cores add 32 products and the sum so far after shifting each to the largest exponent and cutting it to 14
  bits (DeepSeek-V3, arXiv 2412.19437, section 3.5.2, of H800): each of 34 terms and results loses at most 2^-13 of the
  largest, which the block's sum of |a||b| is above, in each of the 4 instructions of a block of 128.
- exp and division are approximate to 2 units in the last place (CUDA programming guide, ex2.approx and div.full), so
  what contains them has twice the bound.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from pithtrain.layers import router
from pithtrain.ops import cross_entropy, fp8, fp8_gemm, linear, permute, swiglu
from pithtrain.ops.fp8 import BLOCK, E4M3, Quantised, RowBlocks, dequantise, dequantise_weight
from pithtrain.ops.linear import Compute, Groups
from pithtrain.ops.parameter import Weight
from pithtrain.ops.permute import Permutation, plan
from tests.device.measure import different, worst
from tests.device.report import Case, Place, Row, Shape, each, judged

UNIT = 2.0**-24  # half a unit in the last place of fp32, relative
TENSOR_CORE = 4 * 34 * 2.0**-13
SIZES = ((0, 3, 129, 0), (1,), (0, 0), (200, 56))
CPU = torch.device("cpu")
Make = Callable[..., Tensor]
Operands = tuple[Quantised, Quantised, RowBlocks]


def randn(place: Place, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator(place.device).manual_seed(seed), device=place.device)


def awkward(place: Place, rows: int, features: int, seed: int = 0) -> Tensor:
    """Magnitudes from subnormal to the largest, zeros, outliers, NaN and Inf."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features, generator=generator)
    x *= torch.exp2(torch.randint(-140, 120, (rows, 1), generator=generator).float())
    x[torch.rand(x.shape, generator=generator) < 0.01] *= 1000
    x[:: max(1, rows // 3)] = 0
    special = torch.tensor([math.nan, math.inf, -math.inf, 2.0**-149, 3.4028235e38])[: x.numel() - 1]
    x.view(-1)[torch.randperm(x.numel(), generator=generator)[: len(special)]] = special
    return x.to(place.device)


def integers(place: Place, *shape: int, seed: int) -> Tensor:
    """-4 to 4, exact in E4M3; sums of 128 products are exact in 14 bits, sums of those in fp32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).float().to(place.device)


def same(name: str, case: str, got: Iterable[Tensor], expected: Iterable[Tensor]) -> Row:
    """A check that no bit differs."""
    return judged(name, case, sum(different(*pair) for pair in zip(got, expected, strict=True)), 0)


def twice(name: str, call: Callable[[], Sequence[Tensor]]) -> Row:
    return same(name, "the same bits twice", call(), call())


def host(x: Quantised) -> Quantised:
    return Quantised(*(part.cpu() for part in x))


def quantisation(place: Place) -> Iterator[Row]:
    cases: list[Case] = []
    for sizes, features in (((0, 3, 129, 0, 128), 140), ((1,), 1), ((257,), 48), ((0, 0), 16)):
        for dtype in (torch.bfloat16, torch.float32):
            cases.append(("quantise", partial(_quantise, place, sizes, features, dtype)))
    for shape in ((2, 130, 140), (3, 128, 20), (1, 1, 1)):
        cases.append(("quantise weight", partial(_quantise_weight, place, shape)))
    yield from each(place, [*cases, ("quantise", partial(_quantise_layer, place, place.shape))])


def _quantise(place: Place, sizes: tuple[int, ...], features: int, dtype: torch.dtype) -> Iterator[Row]:
    x = awkward(place, sum(sizes), features).to(dtype) if sum(sizes) else randn(place, 0, features).to(dtype)
    rows, columns = fp8.quantise(x, RowBlocks.of(sizes, place.device))
    alone, nothing = fp8.quantise(x, RowBlocks.of(sizes, place.device), columns=False)
    expected = fp8.quantise_rows_reference(x.cpu()), fp8.quantise_columns_reference(x.cpu(), RowBlocks.of(sizes, CPU))
    case = f"{sizes} x {features} {str(dtype)[6:]}, bits of the CPU's"
    yield same("quantise", case, [*host(rows), *host(columns)], [*expected[0], *expected[1]])
    yield same("quantise rows", case, [*alone, nothing.values], [*rows, columns.values[:0]])


def _quantise_weight(place: Place, shape: tuple[int, int, int]) -> Iterator[Row]:
    for dtype in (torch.bfloat16, torch.float32):
        weight = awkward(place, shape[0] * shape[1], shape[2]).view(shape).to(dtype)
        got, expected = fp8.quantise_weight(weight), fp8.quantise_weight_reference(weight.cpu())
        case = f"{shape} {str(dtype)[6:]}, bits of the CPU's"
        yield same("quantise weight", case, [*host(got[0]), *host(got[1])], [*expected[0], *expected[1]])


def _quantise_layer(place: Place, shape: Shape) -> Iterator[Row]:
    """At the layer's size against torch's operators on the same device, which the cases above hold to the CPU's."""
    sizes = group_sizes(place, shape)
    x, blocks = randn(place, shape.rows, shape.hidden).bfloat16(), RowBlocks.of(sizes, place.device)
    rows, columns = fp8.quantise(x, blocks)
    yield same("quantise", "layer, bits of torch's", rows, fp8.quantise_rows_reference(x))
    yield same("quantise", "layer, columns, bits of torch's", columns, fp8.quantise_columns_reference(x, blocks))
    yield twice("quantise", lambda: [part for copy in fp8.quantise(x, blocks) for part in copy])
    weight = randn(place, shape.experts, 2 * shape.expert_hidden, shape.hidden).bfloat16()
    got, expected = fp8.quantise_weight(weight), fp8.quantise_weight_reference(weight)
    yield same("quantise weight", "layer, bits of torch's", [*got[0], *got[1]], [*expected[0], *expected[1]])
    yield twice("quantise weight", lambda: [part for copy in fp8.quantise_weight(weight) for part in copy])


def chosen(place: Place, shape: Shape) -> Tensor:
    """Experts of every token, distinct, drawn evenly: [T, K] int64."""
    return randn(place, shape.tokens, shape.experts, seed=9).topk(shape.top_k).indices


def group_sizes(place: Place, shape: Shape) -> tuple[int, ...]:
    return tuple(chosen(place, shape).flatten().bincount(minlength=shape.experts).tolist())


def products(place: Place) -> Iterator[Row]:
    cases: list[Case] = [("FP8 product", partial(_fp8_exact, place, sizes)) for sizes in SIZES]
    cases += [("FP8 product", partial(_fp8_random, place, (0, 3, 129, 0), 136, 264))]
    shape = place.shape
    layer = group_sizes(place, shape)
    cases += [("FP8 product", partial(_fp8_random, place, layer, 2 * shape.expert_hidden, shape.hidden))]
    cases += [("FP8 product", partial(_groups_apart, place)), ("MXFP8 product", partial(_mx, place))]
    cases += [("bf16 product", partial(_bf16, place, sizes)) for sizes in ((0, 3, 129, 0), layer)]
    yield from each(place, cases)


def _fp8_products(place: Place, sizes: tuple[int, ...], outs: int, ins: int, make: Make) -> list[Operands]:
    """Operands of forward, input gradient and weight gradient."""
    blocks = RowBlocks.of(sizes, place.device)
    x, grad = make(place, sum(sizes), ins, seed=1), make(place, sum(sizes), outs, seed=2)
    (rows, columns), (grad_rows, grad_columns) = fp8.quantise(x, blocks), fp8.quantise(grad, blocks)
    plain, transposed = fp8.quantise_weight(make(place, len(sizes), outs, ins, seed=3))
    return [(rows, plain, blocks), (grad_rows, transposed, blocks), (grad_columns, columns, blocks)]


def _weight_gradient(grad: Quantised, x: Quantised, blocks: RowBlocks) -> Tensor:
    """Added to ones."""
    shape = len(blocks.sizes), grad.values.shape[0], x.values.shape[0]
    buffer = torch.ones(shape, device=grad.values.device)
    fp8_gemm.add_weight_gradient(buffer, grad, x, blocks)
    return buffer


def _fp8_exact(place: Place, sizes: tuple[int, ...]) -> Iterator[Row]:
    forward, backward, gradient = _fp8_products(place, sizes, 140, 260, integers)
    on_host = RowBlocks.of(sizes, CPU)
    for name, (x, weight, blocks) in (("forward", forward), ("input gradient", backward)):
        for dtype in (torch.bfloat16, torch.float32):
            got = fp8_gemm.multiply(x, weight, blocks, dtype)
            expected = fp8_gemm.multiply_reference(host(x), host(weight), on_host, dtype)
            yield same(f"FP8 {name}", f"{sizes} {str(dtype)[6:]}, exact sums", [got.cpu()], [expected])
    expected = torch.ones(len(sizes), 140, 260)
    fp8_gemm.add_weight_gradient_reference(expected, host(gradient[0]), host(gradient[1]), on_host)
    yield same("FP8 weight gradient", f"{sizes}, exact sums", [_weight_gradient(*gradient).cpu()], [expected])


def _fp8_random(place: Place, sizes: tuple[int, ...], outs: int, ins: int) -> Iterator[Row]:
    """Of normal values: the largest error over the sum of |a||b|, against the exact product of what was quantised."""
    forward, backward, gradient = _fp8_products(place, sizes, outs, ins, randn)
    case = f"{len(sizes)} groups, {sum(sizes)} rows, {outs} x {ins}"
    for name, (x, weight, blocks) in (("forward", forward), ("input gradient", backward)):
        got = fp8_gemm.multiply(x, weight, blocks, torch.float32)
        parts = zip(got.split(sizes), _split_rows(x, sizes), range(len(sizes)), strict=True)
        matrices = ((part, rows, dequantise_weight(_one(weight, group))[0].T) for part, rows, group in parts)
        yield judged(f"FP8 {name}", case, _of_magnitudes(matrices), _fp8_bound(place, x.values.shape[1]))
        yield twice(f"FP8 {name}", lambda: [fp8_gemm.multiply(x, weight, blocks, torch.float32)])  # noqa: B023
    grads, xs, blocks = gradient
    spans = [range(start * BLOCK, end * BLOCK) for start, end in pairwise([0, *blocks.ends.tolist()])]
    got, longest = _weight_gradient(*gradient), max(map(len, spans))
    matrices = ((slot, _columns(grads, span), _columns(xs, span).T) for slot, span in zip(got, spans, strict=True))
    ratio = _of_magnitudes(matrices, added=1.0)
    yield judged("FP8 weight gradient", case, ratio, _fp8_bound(place, longest))
    yield twice("FP8 weight gradient", lambda: [_weight_gradient(*gradient)])


def _fp8_bound(place: Place, terms: int) -> float:
    return (terms + 3) * UNIT + TENSOR_CORE * (place.device.type == "cuda")


def _one(weight: Quantised, group: int) -> Quantised:
    return Quantised(weight.values[group : group + 1], weight.scales[group : group + 1])


def _split_rows(x: Quantised, sizes: tuple[int, ...]) -> Iterator[Tensor]:
    for values, scales in zip(x.values.split(sizes), x.scales.split(sizes, 1), strict=True):
        yield dequantise(Quantised(values, scales))


def _columns(x: Quantised, span: range) -> Tensor:
    scales = x.scales[span.start // BLOCK : span.stop // BLOCK]
    return dequantise(Quantised(x.values[:, span.start : span.stop], scales))


def _of_magnitudes(products: Iterable[tuple[Tensor, Tensor, Tensor]], added: float = 0.0) -> float:
    """Over (result, a, b): the largest |result - added - a @ b| over added + |a| @ |b|, in float64."""
    ratios = [0.0]
    for got, a, b in products:
        a, b = a.double(), b.double()
        ratios.append(worst(got, added + a @ b, added + a.abs() @ b.abs()))
    return max(ratios)


def _groups_apart(place: Place) -> Iterator[Row]:
    """NaN in one group's rows and weight, and in an idle group's weight, changes no bit of the others."""
    sizes = (3, 0, 130, 2)
    x, weight, blocks = randn(place, 135, 72), randn(place, 4, 40, 72, seed=1), RowBlocks.of(sizes, place.device)
    spoiled, spoiled_weight = x.clone(), weight.clone()
    spoiled[:3] = spoiled_weight[:2] = math.nan
    clean, dirty = (
        fp8_gemm.multiply(fp8.quantise(rows, blocks)[0], fp8.quantise_weight(matrix)[0], blocks, torch.float32)
        for rows, matrix in ((x, weight), (spoiled, spoiled_weight))
    )
    yield same("FP8 forward", "NaN in other groups", [dirty[3:]], [clean[3:]])
    yield judged("FP8 forward", "NaN shows in its own", int((~dirty[:3].isnan()).sum()), 0)


def _mx(place: Place) -> Iterator[Row]:
    """The product of blocks of 32: a launcher only, for Blackwell."""
    if place.device.type != "cuda" or torch.cuda.get_device_capability(place.device)[0] != 10:
        yield Row("MXFP8 product", "not run", note="needs CUDA and sm_100")
        return
    from pithtrain.ops.kernels.fp8_gemm import multiply_mx_triton

    x, weight = randn(place, 130, 256).to(E4M3), randn(place, 24, 256, seed=1).to(E4M3)
    exponents = torch.randint(120, 134, (154, 8), generator=torch.Generator().manual_seed(0))
    scales = exponents.to(torch.uint8).to(place.device)
    operands = Quantised(x, scales[:130].contiguous()), Quantised(weight, scales[130:].contiguous())
    wide = [v.values.double() * torch.exp2(v.scales.double() - 127).repeat_interleave(32, 1) for v in operands]
    ratio = _of_magnitudes([(multiply_mx_triton(*operands, torch.float32), wide[0], wide[1].T)])
    yield judged("MXFP8 product", "130 x 24 x 256", ratio, _fp8_bound(place, 256))


def _bf16(place: Place, sizes: tuple[int, ...]) -> Iterator[Row]:
    """torch's grouped product, as the trainer calls it. Results are rounded to bf16; sums are in fp32 or near it."""
    outs, ins, compute = 2 * place.shape.expert_hidden, place.shape.hidden, Compute("bf16")
    groups = Groups.of(sizes, place.device, compute)
    x, grad = (randn(place, sum(sizes), side, seed=side).bfloat16() for side in (ins, outs))
    weight = Weight(
        randn(place, len(sizes), outs, ins, seed=3).bfloat16(), torch.zeros(len(sizes), outs, ins, device=place.device)
    )
    leaf = x.clone().requires_grad_()
    output = linear.grouped_linear(leaf, weight, groups, compute)
    output.backward(grad)
    assert leaf.grad is not None
    parts = list(zip(sizes, x.split(sizes), grad.split(sizes), weight.value, strict=True))
    results = {
        "forward": [(got, a, m.T) for got, (_, a, _, m) in zip(output.split(sizes), parts, strict=True)],
        "input gradient": [(got, g, m) for got, (_, _, g, m) in zip(leaf.grad.split(sizes), parts, strict=True)],
        "weight gradient": [(got, g.T, a) for got, (n, a, g, _) in zip(weight.grad, parts, strict=True) if n],
    }
    for name, triples in results.items():
        terms = max(b.shape[0] for _, _, b in triples)
        bound = 2.0**-8 + 4 * terms * UNIT  # one rounding to bf16; sums may be cut rather than rounded
        yield judged(f"bf16 {name}", f"{len(sizes)} groups, {sum(sizes)} rows", _of_magnitudes(triples), bound)


def elementwise(place: Place) -> Iterator[Row]:
    cases: list[Case] = []
    for shape in ((11, 518), (3, 6), (1, 2), (0, 8), (place.shape.rows // 16, 2 * place.shape.expert_hidden)):
        for form in ((1.0, math.inf, 0.0), (1.702, 1.5, 1.0)):
            cases.append(("SwiGLU", partial(_swiglu, place, shape, *form)))
    for rows, vocabulary in ((7, 13), (1, 1), (4, 4096), (5, 9001), (64, place.shape.vocabulary)):
        cases.append(("loss", partial(_loss, place, rows, vocabulary)))
    yield from each(place, cases)


def _swiglu(place: Place, shape: tuple[int, int], alpha: float, limit: float, shift: float) -> Iterator[Row]:
    plain = math.isinf(limit)
    case, name = f"{shape}", "SwiGLU" if plain else "clamped SwiGLU"
    gate_up, upstream = 2 * randn(place, *shape), randn(place, shape[0], shape[1] // 2, seed=1)
    gate_up.view(-1)[::7] *= 60  # sigmoids of exactly 0 and 1
    gate_up.view(-1)[3::13] = 1.5

    def run(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        leaf = gate_up.to(torch.bfloat16).to(dtype).requires_grad_()
        output = swiglu.swiglu(leaf) if plain else swiglu.clamped_swiglu(leaf, alpha, limit)
        return output.detach(), torch.autograd.grad(output, leaf, upstream.to(torch.bfloat16).to(dtype))[0]

    wide, narrow = run(torch.float32), run(torch.bfloat16)
    yield same(name, f"{case} bf16 is fp32 rounded once", narrow, [part.bfloat16() for part in wide])
    exact = gate_up.bfloat16().double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + shift
    output, upstream = gate * torch.sigmoid(alpha * gate) * up, upstream.bfloat16().double()
    (gradient,) = torch.autograd.grad(output, exact, upstream)
    gate, up, output = gate.detach(), up.detach(), output.detach()
    slope = 2 * UNIT * (torch.sigmoid(alpha * gate) + 2.0**-102) * (8 + 2 * (alpha * gate).abs())
    yield judged(name, f"{case} of the bound", worst(wide[0], output, slope * (gate * up).abs()), 1.0)
    parts = slope * (upstream * up).abs() * (1 + (alpha * gate).abs()), slope * (upstream * gate).abs()
    yield judged(f"{name} backward", f"{case} of the bound", worst(wide[1], gradient, torch.cat(parts, -1)), 1.0)
    yield twice(name, lambda: run(torch.bfloat16))


def _loss(place: Place, rows: int, vocabulary: int) -> Iterator[Row]:
    logits, scale = 4 * randn(place, rows, vocabulary), 0.125
    labels = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(1)).to(place.device)
    labels[1::3] = cross_entropy.IGNORED
    labelled, case = labels != cross_entropy.IGNORED, f"{rows} x {vocabulary}"
    exact = logits.double().log_softmax(1)
    target = labels.clamp(min=0)[:, None]
    loss = -(exact.gather(1, target).squeeze(1) * labelled).sum()
    probs = exact.exp() * (scale * labelled)[:, None]
    grad = probs.scatter_add(1, target, -(scale * labelled.double())[:, None])
    error = 2 * UNIT * (24 + 4 * float(logits.abs().max()))
    evaluated, nothing = cross_entropy.chunk_loss(logits.clone(), labels, None)
    got, got_grad = cross_entropy.chunk_loss(logits.clone(), labels, scale)
    assert nothing is None and got_grad is not None
    yield same("loss", f"{case} as in evaluation", [got], [evaluated])
    yield judged("loss", f"{case} of the bound", worst(got, loss, error * max(int(labelled.sum()), 1)), 1.0)
    allowance = error * probs + UNIT * grad.abs() + 2.0**-126
    yield judged("loss gradient", f"{case} of the bound", worst(got_grad, grad, allowance), 1.0)

    def again() -> list[Tensor]:
        loss, grad = cross_entropy.chunk_loss(logits.clone(), labels, scale)
        return [loss, logits if grad is None else grad]

    yield twice("loss gradient", again)


def copies(place: Place) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    odd = torch.randint(-1, 5, (9, 3), generator=generator)
    slots = (odd, torch.tensor([[-1, 4]]), torch.zeros(0, 2, dtype=torch.int64), torch.full((2, 2), -1))
    cases: list[Case] = [
        ("sum of copies", partial(_copies, place, ids, 5, features)) for ids in slots for features in (5, 1031)
    ]
    layer = chosen(place, place.shape).cpu()
    cases.append(("sum of copies", partial(_copies, place, layer, place.shape.experts, place.shape.hidden)))
    for experts, top_k in ((8, 2), (7, 3), (160, 6), (10, 10), (place.shape.experts, place.shape.top_k)):
        cases.append(("router top-k", partial(_top_k, place, experts, top_k)))
    yield from each(place, cases)


def _copies(place: Place, ids: Tensor, slots: int, features: int) -> Iterator[Row]:
    number = int((ids >= 0).sum())
    on_host, case = plan(ids, slots, number), f"{tuple(ids.shape)} x {features}"
    on_card = plan(ids.to(place.device), slots, number)
    fields = ("entries", "rows", "copies", "starts")
    yield same("plan", case, *([getattr(p, name).cpu() for name in fields] for p in (on_card, on_host)))
    x, weights = randn(place, number, features).bfloat16(), randn(place, number, seed=1)
    grad = randn(place, ids.shape[0], features, seed=2).bfloat16()
    for factors, kind in ((None, ""), (torch.exp2(weights.round()), "weighted ")):
        expected = permute.sum_copies(x.cpu(), on_host, None if factors is None else factors.cpu())
        got = permute.sum_copies(x, on_card, factors)
        yield same(f"{kind}sum of copies", f"{case}, bits of the CPU's", [got.cpu()], [expected])
        yield twice(f"{kind}sum of copies", lambda: [permute.sum_copies(x, on_card, factors)])  # noqa: B023
    grads, products = permute.spread(grad, on_card, x, weights)
    expected, _ = permute.spread(grad.cpu(), on_host, x.cpu(), weights.cpu())
    yield same("weighted sum backward", f"{case}, bits of the CPU's", [grads.cpu()], [expected])
    yield judged("weighted sum backward", f"{case} of the bound", _dots(products, x, grad, on_card), 1.0)
    yield twice("weighted sum backward", lambda: permute.spread(grad, on_card, x, weights))


def _dots(got: Tensor, x: Tensor, grad: Tensor, permutation: Permutation) -> float:
    """Dot products of copies with their rows' gradients: within n * 2^-23 of the sum of their n terms' magnitudes."""
    ratios = [0.0]
    for part, rows, copy in zip(*(whole.split(4096) for whole in (got, permutation.rows, x)), strict=True):
        terms = copy.double() * grad[rows].double()
        ratios.append(worst(part, terms.sum(1), x.shape[1] * 2 * UNIT * terms.abs().sum(1)))
    return max(ratios)


def _top_k(place: Place, experts: int, top_k: int) -> Iterator[Row]:
    scores = randn(place, max(place.shape.tokens, 13), experts)
    scores[3:6] = scores[3:6].round()
    scores[6], scores[7, ::2], scores[8, 1::2] = 0.25, math.nan, -0.0
    got, expected = router.topk_lowest_index(scores, top_k), router.topk_lowest_index(scores.cpu(), top_k)
    yield same("router top-k", f"{top_k} of {experts}, the CPU's", [got.cpu()], [expected])
    yield twice("router top-k", lambda: [router.topk_lowest_index(scores, top_k)])
