#!/usr/bin/env python3
"""What PyTorch and Triton do on this machine's first GPU, as the file that `qt-bench --peers` reads.

    python3 peers.py --json peers.json [--only gemm,attention,operators,linear,layer,pretrain,optimizer,copy]

Times are taken as qt-bench takes them: the host's clock around batches of launches that follow each other without
waiting, medians over the batches. Matrix products are replayed from a CUDA graph, so that Python's own time does not
count. Needs PyTorch and Triton; results are checked against float64 before they are timed.
"""

import argparse
import copy
import datetime
import importlib.metadata
import itertools
import json
import math
import sys
import time

import torch
import torch._functorch.config
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

SAMPLES = 20
SAMPLE_S = 0.010
# Of layers, so that what goes by before the device begins counts for little.
LAYER_SAMPLE_S = 0.100
WARM_UP_S = 0.050
GRAPH_LAUNCHES = 10
BLOCK = 128


def quantile(ordered, part):
    """Between two of the ordered samples on a straight line."""
    at = part * (len(ordered) - 1)
    below = ordered[math.floor(at)]
    return below + (ordered[math.ceil(at)] - below) * (at - math.floor(at))


def spread(samples_ms):
    ordered = sorted(samples_ms)
    names = {"median_ms": 0.5, "p10_ms": 0.1, "p90_ms": 0.9}
    return {name: quantile(ordered, part) for name, part in names.items()}


def timed(launch, sample_s=SAMPLE_S):
    """The time of one launch: of each sample the mean over its launches."""

    def batch(launches):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(launches):
            launch()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    batch(1)
    warm, fastest = 0.0, math.inf
    while warm < WARM_UP_S:
        elapsed = batch(4)
        warm += elapsed
        fastest = min(fastest, elapsed / 4)
    launches = math.ceil(sample_s / max(fastest, 1e-6))
    return spread([1e3 * batch(launches) / launches for _ in range(SAMPLES)])


def timed_graph(launch):
    """The time of one launch among those of a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        launch()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_LAUNCHES):
            launch()
    of_graph = timed(graph.replay)
    return {name: ms / GRAPH_LAUNCHES for name, ms in of_graph.items()}


# Matrix products


@triton.jit
def block_gemm_kernel(a, b, a_scales, b_scales, c, n, k, blocks_k, tiles_m, tiles_n,
                      TILE_M: tl.constexpr, TILE_N: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr):
    """C[M, N] = A[M, K] B[N, K]^T with a scale for each 128 x 128 block, in BF16. Tiles divide M, N and K.

    GROUP rows of tiles are computed together, so that they share the columns of B in the cache.
    """
    tile = tl.program_id(0)
    in_group = GROUP * tiles_n
    first = tile // in_group * GROUP
    height = min(tiles_m - first, GROUP)
    tile_m = first + tile % in_group % height
    tile_n = tile % in_group // height
    rows = tile_m * TILE_M + tl.arange(0, TILE_M)
    cols = tile_n * TILE_N + tl.arange(0, TILE_N)
    depth = tl.arange(0, DEPTH)
    a_at = a + rows[:, None] * k + depth[None, :]
    b_at = b + cols[None, :] * k + depth[:, None]
    a_scale_at = a_scales + tile_m * TILE_M // 128 * blocks_k
    b_scale_at = b_scales + tile_n * TILE_N // 128 * blocks_k
    sums = tl.zeros((TILE_M, TILE_N), tl.float32)
    for step in range(0, k // DEPTH):
        block = step * DEPTH // 128
        scale = tl.load(a_scale_at + block) * tl.load(b_scale_at + block)
        product = tl.dot(tl.load(a_at), tl.load(b_at), out_dtype=tl.int32)
        sums += product.to(tl.float32) * scale
        a_at += DEPTH
        b_at += DEPTH
    tl.store(c + rows[:, None] * n + cols[None, :], sums.to(tl.bfloat16))


# Rows, columns and depth of a tile, warps, stages.
TILES = [(128, 128, 128, 8, 3), (128, 128, 128, 4, 3), (128, 128, 64, 8, 4), (128, 64, 128, 4, 4), (64, 128, 128, 4, 4)]


def block_gemm(a, b, a_scales, b_scales, c, tiles):
    tile_m, tile_n, depth, warps, stages = tiles
    (m, k), n = a.shape, b.shape[0]
    tiles_m, tiles_n = m // tile_m, n // tile_n
    block_gemm_kernel[(tiles_m * tiles_n,)](
        a, b, a_scales, b_scales, c, n, k, k // BLOCK, tiles_m, tiles_n, tile_m, tile_n, depth, 8,
        num_warps=warps, num_stages=stages)


def check(what, c, a, b, tolerance):
    """Compares some rows of C = A B^T, the factors given in float64 by functions of row indices."""
    rows = torch.randint(0, c.shape[0], (64,), device="cuda")
    cols = torch.randint(0, c.shape[1], (64,), device="cuda")
    expected = a(rows) @ b(cols).T
    error = (c[rows][:, cols].double() - expected).norm() / expected.norm()
    if not error <= tolerance:
        sys.exit(f"{what}: relative error {error:.2e}")


def dequantized(x, scales):
    """Rows of a block-quantized matrix."""
    return lambda rows: x[rows].double() * scales[rows // BLOCK].repeat_interleave(BLOCK, dim=1).double()


def quantized_normal(n):
    """INT8 numbers as those of a quantized normal matrix: a block's largest magnitude is about 4.2 deviations."""
    values = torch.randn(n, n, device="cuda") * 127 / 4.2
    return values.round().clamp(-127, 127).to(torch.int8)


def measure_gemm(sizes):
    results = []

    def add(kernel, n, ms):
        results.append({"kernel": kernel, "m": n, "n": n, "k": n, "time": ms})
        print(f"{kernel}, {n}: {2 * n**3 / ms['median_ms'] / 1e9:.0f} TOP/s", file=sys.stderr)

    for n in sizes:
        a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        check("cuBLAS BF16", a @ b, lambda rows: a[rows].double(), lambda cols: b[:, cols].T.double(), 5e-3)
        add("cublas-bf16", n, timed_graph(lambda: torch.matmul(a, b)))

        x, y = (torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
        scale = torch.ones((), device="cuda")
        fp8 = lambda: torch._scaled_mm(x, y.T, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True)
        check("cuBLAS FP8", fp8(), lambda rows: x[rows].double(), lambda cols: y[cols].double(), 1e-2)
        add("cublas-fp8", n, timed_graph(fp8))

        x, y = (quantized_normal(n) for _ in range(2))
        exact = torch._int_mm(x, y.T)
        check("cuBLAS INT8", exact, lambda rows: x[rows].double(), lambda cols: y[cols].double(), 0.0)
        add("cublas-int8", n, timed_graph(lambda: torch._int_mm(x, y.T)))

        if n % BLOCK:
            continue
        x_scales, y_scales = (torch.rand(n // BLOCK, n // BLOCK, device="cuda") for _ in range(2))
        c = torch.empty(n, n, device="cuda", dtype=torch.bfloat16)
        times = []
        for tiles in TILES:
            c.zero_()
            launch = lambda: block_gemm(x, y, x_scales, y_scales, c, tiles)
            launch()
            check("Triton INT8", c, dequantized(x, x_scales), dequantized(y, y_scales), 5e-3)
            times.append(timed_graph(launch))
        add("triton-int8", n, min(times, key=lambda ms: ms["median_ms"]))
    return results


# Attention

TOKENS, FEATURES, GROUP = 16_384, 2048, 4
BACKENDS = {"torch-cudnn": SDPBackend.CUDNN_ATTENTION, "torch-flash": SDPBackend.FLASH_ATTENTION,
            "torch-efficient": SDPBackend.EFFICIENT_ATTENTION}


def attention_problems(widths, sequences):
    """Those of `qt-bench attention`."""
    for width in widths:
        heads = FEATURES // width
        for sequence in sequences:
            for causal, kv_heads, hidden in ((True, heads, 0), (False, heads, 0), (True, heads // GROUP, 0),
                                             (False, heads, sequence // 4)):
                yield {"batch": TOKENS // sequence, "heads": heads, "kv_heads": kv_heads, "sequence": sequence,
                       "width": width, "causal": causal, "hidden": hidden}


def random_heads(problem, heads):
    """Heads beside each other in memory, as a linear layer leaves them."""
    rows = torch.randn(problem["batch"], problem["sequence"], heads, problem["width"], device="cuda",
                       dtype=torch.bfloat16)
    return rows.transpose(1, 2).requires_grad_()


def measure_attention(widths, sequences):
    results = []
    for problem in attention_problems(widths, sequences):
        q = random_heads(problem, problem["heads"])
        k, v = (random_heads(problem, problem["kv_heads"]) for _ in range(2))
        gradient = torch.randn_like(q)
        mask = None
        if problem["hidden"]:
            seen = torch.arange(problem["sequence"], device="cuda") < problem["sequence"] - problem["hidden"]
            mask = seen.expand(problem["batch"], 1, problem["sequence"], problem["sequence"])
        for kernel, backend in BACKENDS.items():
            if backend == SDPBackend.EFFICIENT_ATTENTION and mask is None:
                # Slower than the others, which do not compute every mask.
                continue

            def forward():
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=problem["causal"],
                                                      enable_gqa=problem["heads"] != problem["kv_heads"])

            def backward():
                torch.autograd.grad(output, (q, k, v), gradient, retain_graph=True)

            row = {"kernel": kernel, **problem, "forward": None, "backward": None}
            try:
                with sdpa_kernel([backend]):
                    output = forward()
                    row["forward"] = timed(forward)
                    row["backward"] = timed(backward)
            except RuntimeError as error:
                print(f"{kernel}, {problem}: {error}", file=sys.stderr)
            results.append(row)
            times = [row[of] and round(row[of]["median_ms"], 3) for of in ("forward", "backward")]
            print(f"{kernel}, {problem}: {times} ms", file=sys.stderr)
    return results


# Operators between linear layers

# Inputs, parameters, and the function of both.
OPERATORS = {
    "rms-norm": (1, 1, lambda x, gain: F.rms_norm(x, gain.shape, gain, 1e-5)),
    "layer-norm": (1, 2, lambda x, gain, bias: F.layer_norm(x, gain.shape, gain, bias, 1e-5)),
    "gelu": (1, 0, lambda x: F.gelu(x)),
    "swiglu": (2, 0, lambda gate, up: F.silu(gate) * up),
}
# As benches/src/operators/turns.rs.
TURNS = 4


def check_operator(what, function, inputs, weights, gradient, actual):
    """Compares some rows of the output and of the gradients of the inputs with those in float64."""
    rows = slice(0, 64)
    inputs = [x[rows].detach().double().requires_grad_() for x in inputs]
    output = function(*inputs, *(weight.detach().double() for weight in weights))
    expected = [output.detach(), *torch.autograd.grad(output, inputs, gradient[rows].double())]
    for tensor, reference in zip(actual, expected):
        error = (tensor[rows].detach().double() - reference).norm() / reference.norm()
        if not error <= 1e-2:
            sys.exit(f"{what}: relative error {error:.2e}")


def measure_operator(what, function, run, inputs, weights, gradients):
    """Both passes, on several sets of inputs by turns, so that none waits in the cache."""
    outputs = [run(*of_set, *weights) for of_set in inputs]
    forward_turns, backward_turns = itertools.cycle(inputs), itertools.cycle(zip(outputs, inputs, gradients))

    def backward():
        output, of_set, gradient = next(backward_turns)
        return torch.autograd.grad(output, [*of_set, *weights], gradient, retain_graph=True)

    check_operator(what, function, inputs[0], weights, gradients[0], [outputs[0], *backward()[:len(inputs[0])]])
    return {"forward": timed(lambda: run(*next(forward_turns), *weights)), "backward": timed(backward)}


# Compiled backward passes may else use up what their forward pass saved, and run once.
@torch._functorch.config.patch(donated_buffer=False)
def measure_operators(names, tokens, columns):
    """Those of `qt-bench operators`."""
    results = []
    for name, rows in itertools.product(names, tokens):
        count, parameters, function = OPERATORS[name]
        for width in columns or [4096 if parameters else 10_880]:
            normal = lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16)  # noqa: E731
            inputs = [[normal(rows, width).requires_grad_() for _ in range(count)] for _ in range(TURNS)]
            gradients = [normal(rows, width) for _ in range(TURNS)]
            weights = [normal(width).requires_grad_() for _ in range(parameters)]
            # Another width would otherwise be compiled as one of any width.
            torch._dynamo.reset()
            for subject, run in (("torch-eager", function), ("torch-compiled", torch.compile(function, dynamic=False))):
                try:
                    run(*inputs[0], *weights)
                except Exception as error:  # torch.compile needs a C compiler, which a machine may lack.
                    print(f"{subject}: {error}", file=sys.stderr)
                    continue
                what = f"{subject}, {name} of {rows} x {width}"
                times = measure_operator(what, function, run, inputs, weights, gradients)
                results.append({"operator": name, "tokens": rows, "columns": width, "subject": subject, **times})
                medians = [round(times[of]["median_ms"], 4) for of in ("forward", "backward")]
                print(f"{what}: {medians} ms", file=sys.stderr)
    return results


# Layers


class RmsNorm(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.gamma, 1e-5)


class Layer(nn.Module):
    """A decoder layer: of benches/src/step/architecture.rs, and, with rotary positions, of examples/src/model/mod.rs."""

    def __init__(self, hidden, heads, inner):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = RmsNorm(hidden), RmsNorm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x, rotate=lambda heads: heads):
        h = self.attention_norm(x)
        q, k, v = (of(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def measure_module(subject, module, x):
    """Both passes of a module on the input x."""
    gradient = torch.randn_like(module(x))

    def both():
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x).backward(gradient)

    forward_ms, both_ms = (timed(launch, LAYER_SAMPLE_S) for launch in (lambda: module(x), both))
    module.zero_grad(set_to_none=True)
    x.grad = None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    y = module(x)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    del y
    batch, sequence, hidden = x.shape
    print(f"{subject}, hidden {hidden}, {batch * sequence} tokens: {both_ms['median_ms']:.3f} ms", file=sys.stderr)
    return {"subject": subject, "tokens": batch * sequence, "hidden": hidden, "outputs": gradient.shape[-1],
            "forward": forward_ms, "both": both_ms, "activation_bytes": held}


def random_input(batch, sequence, hidden):
    return torch.randn(batch, sequence, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def in_float8(module, recipe):
    """A copy of a module, its linear layers but a model's head in FP8 by this recipe of torchao."""
    # Only those who ask for it need the package.
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    is_quantized = lambda _, name: not name.endswith("head")  # noqa: E731
    return convert_to_float8_training(copy.deepcopy(module), config=config, module_filter_fn=is_quantized)


def subjects(module, float8):
    """The module as it is, compiled, and compiled in FP8, where it can be compiled."""
    yield "torch-eager", module
    for recipe in [None, *float8]:
        # Another width would otherwise be compiled as one of any width.
        torch._dynamo.reset()
        converted = in_float8(module, recipe) if recipe else module
        yield f"torchao-{recipe}" if recipe else "torch-compiled", torch.compile(converted, dynamic=False)


def measure_subjects(module, x, float8):
    results = []
    for subject, run in subjects(module, float8):
        try:
            run(x)
        except Exception as error:  # torch.compile needs a C compiler, which a machine may lack.
            print(f"{subject}: {error}", file=sys.stderr)
            continue
        results.append(measure_module(subject, run, x))
    return results


def measure_linear(features, outputs, tokens, float8):
    results = []
    for count in tokens:
        linear = nn.Sequential(nn.Linear(features, outputs, bias=False)).to("cuda", torch.bfloat16)
        results += measure_subjects(linear, random_input(1, count, features), float8)
    return results


def measure_layer(sizes, rows, float8):
    results = []
    for hidden, (batch, sequence) in itertools.product(sizes, rows):
        layer = Layer(hidden, hidden // BLOCK, hidden * 8 // 3 // BLOCK * BLOCK).to("cuda", torch.bfloat16)
        x = random_input(batch, sequence, hidden)
        results += [row | {"sequence": sequence} for row in measure_subjects(layer, x, float8)]
    return results


# Whole training steps

# Hidden, heads, layers, batch, sequence: examples/src/args.rs.
PRESETS = {
    "tiny": (128, 4, 4, 8, 128),
    "small": (512, 8, 9, 32, 512),
    "medium": (768, 12, 16, 16, 1024),
    "large": (2048, 16, 24, 8, 2048),
}
VOCABULARY = 256


class Model(nn.Module):
    """The decoder of examples/src/model/mod.rs, and its loss."""

    def __init__(self, hidden, heads, layers, sequence, checkpointing):
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(VOCABULARY, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads, 3 * hidden) for _ in range(layers))
        self.norm, self.head = RmsNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)
        width = hidden // heads
        angles = torch.outer(torch.arange(sequence), 10_000 ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
        self.register_buffer("cos", angles.cos().bfloat16())
        self.register_buffer("sin", angles.sin().bfloat16())

    def rotate(self, x):
        low, high = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-high, low), dim=-1) * self.sin

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.checkpointing:
                x = checkpoint(layer, x, self.rotate, use_reentrant=False)
            else:
                x = layer(x, self.rotate)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


def measure_training(subject, preset, shape, again):
    """Steps of one model on batches of this shape."""
    hidden, heads, layers, _, _ = PRESETS[preset]
    tokens, targets = (torch.randint(0, VOCABULARY, shape, device="cuda") for _ in range(2))
    torch._dynamo.reset()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    model = Model(hidden, heads, layers, shape[1], again == "layers").cuda()
    if subject.startswith("torchao-"):
        model = in_float8(model, subject.removeprefix("torchao-"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = model if subject == "torch-eager" else torch.compile(model, dynamic=False)

    def loss():
        with torch.autocast("cuda", torch.bfloat16):
            return run(tokens, targets)

    def step():
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for _ in range(4):
        step()
    spread_ms = timed(step)
    taken = torch.cuda.max_memory_reserved() - before
    allocated = torch.cuda.memory_allocated()
    held = loss()
    activations = torch.cuda.memory_allocated() - allocated
    del held
    speed = 1e3 * tokens.numel() / spread_ms["median_ms"]
    print(f"{subject}, {preset}, {shape}, run again: {again}: {speed:.0f} tokens/s, held {activations >> 20} MiB, taken "
          f"{taken >> 20} MiB", file=sys.stderr)
    return {
        "subject": subject, "model": preset, "parameters": sum(it.numel() for it in model.parameters()),
        "batch": shape[0], "sequence": shape[1], "checkpointing": again, "step": spread_ms, "tokens_per_s": speed,
        "activation_bytes": activations, "peak_bytes": taken,
    }


def measure_pretrain(preset, sequences, batches, checkpointing, float8):
    """Steps of BF16 autocast over FP32 parameters, with fused AdamW; also with activation checkpointing of each layer.
    Batches behind the first that does not fit are left out."""
    names = ["torch-eager", "torch-compiled", *(f"torchao-{recipe}" for recipe in float8)]
    _, _, _, batch, of_preset = PRESETS[preset]
    results = []
    for sequence, again, subject in itertools.product(sequences or [of_preset], checkpointing, names):
        for shape in [(it, sequence) for it in sorted(batches) or [batch * of_preset // sequence]]:
            try:
                results.append(measure_training(subject, preset, shape, again))
            except torch.OutOfMemoryError:
                print(f"{subject}, {preset}, {shape}, run again: {again}: out of memory", file=sys.stderr)
                break
    return results


# Optimizer and copy


def measure_optimizer(parameters):
    weight = nn.Parameter(0.02 * torch.randn(parameters, device="cuda"))
    weight.grad = 1e-3 * torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], lr=1e-4, weight_decay=0.1, fused=True)
    return [{"parameters": parameters, "time": timed(optimizer.step)}]


def measure_copy():
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    return [{"bytes": 2 * x.numel() * x.element_size(), "time": timed(lambda: y.copy_(x))}]


def numbers(text):
    return [int(number) for number in text.split(",")]


def batches(text):
    return [tuple(int(number) for number in rows.split("x")) for rows in text.split(",")]


PARTS = ["copy", "gemm", "attention", "operators", "linear", "layer", "pretrain", "optimizer"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", required=True, help="file to write")
    parser.add_argument("--only", type=lambda text: text.split(","), default=PARTS, help="parts to measure")
    parser.add_argument("--sizes", type=numbers, default=[2048, 4096, 8192], help="M = N = K of products")
    parser.add_argument("--widths", type=numbers, default=[64, 128], help="features of heads")
    parser.add_argument("--sequences", type=numbers, default=[1024, 2048, 4096, 8192, 16384], help="of attention")
    parser.add_argument("--operators", type=lambda text: text.split(","), default=list(OPERATORS),
                        help="operators between linear layers")
    parser.add_argument("--columns", type=numbers, default=[],
                        help="columns of their matrices, if not 4096 of norms and 10880 of the others")
    parser.add_argument("--operator-tokens", type=numbers, default=[32_768],
                        help="their rows: with few of them launches take longer than kernels")
    parser.add_argument("--features", type=int, default=4096, help="features of the linear layer")
    parser.add_argument("--outputs", type=int, help="features of its output, if these are others")
    parser.add_argument("--tokens", type=numbers, default=[2048, 8192], help="rows of its input")
    parser.add_argument("--hidden", type=numbers, default=[1024, 2048, 4096], help="features of decoder layers")
    parser.add_argument("--rows", type=batches, default=[(2, 1024)], help="their batches: 2x1024,4x2048")
    parser.add_argument("--preset", choices=PRESETS, default="medium", help="of the program pretrain")
    parser.add_argument("--preset-sequences", type=numbers, default=[], help="in batches of as many tokens")
    parser.add_argument("--preset-batches", type=numbers, default=[], help="sequences in a batch, not as many tokens")
    parser.add_argument("--checkpointing", type=lambda text: text.split(","), default=["none"],
                        help="none, layers: which parts of its model run again in the backward pass")
    parser.add_argument("--float8", type=lambda text: text.split(","), default=[],
                        help="recipes of torchao for layers and steps: tensorwise, rowwise; needs that package")
    parser.add_argument("--parameters", type=int, default=1 << 28, help="parameters of the optimizer")
    args = parser.parse_args()
    unknown = set(args.only) - set(PARTS)
    if unknown:
        parser.error(f"--only: there is no {', '.join(sorted(unknown))}")
    unknown = set(args.operators) - set(OPERATORS)
    if unknown:
        parser.error(f"--operators: there is no {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        sys.exit("peers.py: there is no GPU")
    name = torch.cuda.get_device_name(0)
    measures = {
        "copy": measure_copy,
        "gemm": lambda: measure_gemm(args.sizes),
        "attention": lambda: measure_attention(args.widths, args.sequences),
        "operators": lambda: measure_operators(args.operators, args.operator_tokens, args.columns),
        "linear": lambda: measure_linear(args.features, args.outputs or args.features, args.tokens,
                                         args.float8),
        "layer": lambda: measure_layer(args.hidden, args.rows, args.float8),
        "pretrain": lambda: measure_pretrain(args.preset, args.preset_sequences, args.preset_batches, args.checkpointing,
                                             args.float8),
        "optimizer": lambda: measure_optimizer(args.parameters),
    }
    versions = f"PyTorch {torch.__version__}, Triton {triton.__version__}, CUDA {torch.version.cuda}"
    if args.float8:
        versions += f", torchao {importlib.metadata.version('torchao')}"
    results = {
        "run": {
            "device": name,
            "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "command": " ".join(["peers.py", *sys.argv[1:]]),
            "versions": versions,
        }
    }
    for part in PARTS:
        if part in args.only:
            results[part] = measures[part]()
            torch.cuda.empty_cache()
    with open(args.json, "w") as file:
        json.dump(results, file, indent=2)
        file.write("\n")


if __name__ == "__main__":
    main()
