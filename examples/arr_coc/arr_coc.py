#!/usr/bin/env python3
"""ARR-COC in PyTorch: gives an image's patches tokens where they matter, and encodes them by multi-query attention over packed sequences.

README.md explains it. Weights, image and results are those of the C++ program beside this file.
"""

import argparse
import base64
import heapq
import json
import math
import pathlib
import sys

import torch
import torch.nn.functional as F
from tilewave import ops

PATCH_SIDE = 64
MIN_TOKENS, MAX_TOKENS, MEAN_TOKENS = 64, 400, 160
CHANNELS, COLOURS, APPEARANCE = 13, 6, 10
SCORER_DIM = 64
HEADS, HEAD_DIM = 4, 64
DIM = HEADS * HEAD_DIM
MIN_SIDE, MAX_SIDE = 64, 2048
LOOKED_FOR = ((200, 60, 44), (250, 200, 90))  # the lighthouse's red, the sun's yellow

# ---- Weights and the image ----


def hash32(x):
    """The last steps of MurmurHash3, on int64 tensors that hold 32 bits."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)


def weight(seed, rows, cols):
    """f32 [rows, cols], uniform with mean 0 and variance 1 / rows: element i is a function of seed and i alone."""
    bits = hash32((hash32(torch.tensor(seed)) + torch.arange(rows * cols)) & 0xFFFFFFFF) >> 8
    return ((bits.double() * 2**-24 - 0.5) * math.sqrt(12 / rows)).float().view(rows, cols)


def lighthouse():
    """A lighthouse by the sea at dusk: uint8 [384, 512, 3]."""
    height, width = 384, 512
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    from_sun, from_tower, from_rock = (x - 368).abs(), (x - 128).abs(), (y - 304).abs()

    def colour(r, g, b):
        return torch.stack([torch.as_tensor(c).expand(height, width) for c in (r, g, b)], 2)

    image = colour(48 + y // 2, 64 + y // 4, 128 - y // 8)

    def paint(where, *rgb):
        image[where] = colour(*rgb)[where]

    wave, grey = (2 * x + y * y // 8) % 64, hash32(y * width + x) % 96 + 32
    paint(y >= 224, 16 + wave // 2, 48 + wave // 2, 88 + wave // 2)
    paint((y >= 224) & (from_sun < 16 + (y - 224) // 4) & (wave > 40), 250, 200, 90)
    paint(from_sun**2 + (y - 112) ** 2 < 40 * 40, 250, 200, 90)
    paint(from_tower**2 + 4 * from_rock**2 < 112 * 112, grey, grey, grey)
    tower = (y >= 80) & (y < 272) & (from_tower < 10 + y // 16)
    paint(tower, 200, 60, 44)
    paint(tower & (y // 24 % 2 == 0), 232, 232, 232)
    paint((y >= 60) & (y < 80) & (from_tower < 10), 255, 240, 170)
    return image.byte()


def read_ppm(path):
    """A binary PPM file (P6, 8 bits) as uint8 [height, width, 3]. ValueError for anything else."""
    data = pathlib.Path(path).read_bytes()
    if data[:2] != b"P6":
        raise ValueError(f"{path}: is not a binary PPM file: it does not begin with P6")
    at, header = 2, []
    while len(header) < 3:
        while data[at : at + 1].isspace() or data[at : at + 1] == b"#":
            at = data.find(b"\n", at) + 1 or len(data) if data[at : at + 1] == b"#" else at + 1
        end = at
        while data[end : end + 1].isdigit():
            end += 1
        if not 0 < end - at < 10:
            raise ValueError(f"{path}: the header's {('width', 'height', 'largest value')[len(header)]} is not a number of up to 9 digits")
        header.append(int(data[at:end]))
        at = end
    width, height, most = header
    if not (MIN_SIDE <= width <= MAX_SIDE and MIN_SIDE <= height <= MAX_SIDE):
        raise ValueError(f"{path}: is {width} x {height} pixels; allowed are sides of {MIN_SIDE} to {MAX_SIDE}")
    if most != 255:
        raise ValueError(f"{path}: has a largest value of {most}; only 255 is supported")
    pixels, size = data[at + 1 :], width * height * 3  # one white-space character ends the header
    if len(pixels) < size:
        raise ValueError(f"{path}: ends after {len(pixels)} of {size} bytes of pixels")
    return torch.frombuffer(bytearray(pixels[:size]), dtype=torch.uint8).view(height, width, 3)


# ---- 13 channels ----


def colour_channels(rgb):
    """Red, green, blue, luma, red - green and blue - yellow, of bytes [..., 3]: f32 [6, ...]."""
    r, g, b = (rgb.float() / 255).unbind(-1)
    return torch.stack([r, g, b, 0.2126 * r + 0.7152 * g + 0.0722 * b, r - g, b - (r + g) / 2])


def texture_of(image, fixation=(0.5, 0.5)):
    """The image as f32 [13, height, width]: colours, gradient in x and y, edge strength, contrast, x, y, eccentricity."""
    colours = colour_channels(image)
    luma = colours[3][None, None]
    sobel = torch.tensor([1.0, 2, 1])[:, None] * torch.tensor([-1.0, 0, 1]) / 4
    dx, dy = F.conv2d(F.pad(luma, (1, 1, 1, 1), "replicate"), torch.stack([sobel, sobel.T])[:, None])[0]
    surround = F.avg_pool2d(F.pad(luma, (4, 4, 4, 4), "replicate"), 9, stride=1)
    v, u = torch.meshgrid(*((torch.arange(n) + 0.5) / n for n in image.shape[:2]), indexing="ij")
    rest = [dx, dy, torch.hypot(dx, dy), (luma - surround)[0, 0].abs()]
    return torch.cat([colours, torch.stack(rest + [2 * u - 1, 2 * v - 1, 2 * torch.hypot(u - fixation[0], v - fixation[1])])])


# ---- Relevance ----


def cut(texture):
    """The patches of a grid, row by row: (x, y, width, height)."""
    edges = []
    for side in texture.shape[1:]:
        count = (side + PATCH_SIDE // 2) // PATCH_SIDE
        edges.append([side * i // count for i in range(count + 1)])
    ys, xs = edges
    return [(x, y, x1 - x, y1 - y) for y, y1 in zip(ys, ys[1:]) for x, x1 in zip(xs, xs[1:])]


def standardise(values, of=None):
    """How many standard deviations `values` are above the mean of `of`, along the first dimension. Differences below 1e-3 count as none."""
    of = values if of is None else of
    return (values - of.mean(0)) / of.std(0, correction=0).clamp(min=1e-3)


def features_of(texture, patches, query):
    """What the scorers know of the patches and of the query's colours: f32 [patches, 20] and [colours, 20]."""
    pixels = [texture[:APPEARANCE, y : y + h, x : x + w].flatten(1).double() for x, y, w, h in patches]
    features = torch.stack([torch.cat([p.mean(1), p.std(1, correction=0)]) for p in pixels])
    colours = standardise(colour_channels(torch.tensor(query)).T.double(), features[:, :COLOURS])
    return standardise(features).float(), F.pad(colours, (0, 2 * APPEARANCE - COLOURS)).float()


def score(texture, patches, query, attention=ops.attention):
    """Information, salience and match of each patch: f64 [3, patches]. On the CPU in f32, whatever device encodes the tokens."""
    features, colours = features_of(texture, patches, query)

    def embed(x, scorer):
        return x @ weight(scorer, 2 * APPEARANCE, SCORER_DIM)

    def attend(q, kv, mask=None):
        q, kv = q[None, :, None], kv[None, :, None]
        o, lse = attention(q, kv, kv, mask=mask, return_lse=True)
        return o[0, :, 0], lse[0, 0]

    def surprise(x, sees):
        return (x.double() - attend(x, x, sees)[0].double()).norm(dim=1)

    x, y, w, h = torch.tensor(patches).T
    others = ~torch.eye(len(patches), dtype=torch.bool)
    touch = (x[:, None] <= x + w) & (x <= (x + w)[:, None]) & (y[:, None] <= y + h) & (y <= (y + h)[:, None])
    eccentricity = texture[12, y + h // 2, x + w // 2].double()
    return torch.stack(
        [
            surprise(embed(features, 1), others),
            surprise(embed(features, 2), others & touch) / (1 + eccentricity),
            attend(embed(features, 3), embed(colours, 3))[1].double(),
        ]
    )


def allocate(relevance, budget):
    """Divides the budget by Sainte-Lague's method: 64 to 400 tokens for each patch, and the budget exactly."""
    least, most = len(relevance) * MIN_TOKENS, len(relevance) * MAX_TOKENS
    if not least <= budget <= most:
        raise ValueError(f"budget: is {budget} tokens; {len(relevance)} patches take {least} to {most}")
    tokens = [MIN_TOKENS] * len(relevance)
    claims = [(-math.exp(2 * r), p) for p, r in enumerate(relevance)]
    heapq.heapify(claims)
    for _ in range(budget - least):
        _, p = heapq.heappop(claims)
        tokens[p] += 1
        if tokens[p] < MAX_TOKENS:
            heapq.heappush(claims, (-math.exp(2 * relevance[p]) / (2 * (tokens[p] - MIN_TOKENS) + 1), p))
    return tokens


def plan(texture, query=LOOKED_FOR, budget=None, attention=ops.attention):
    """The patches, as dictionaries: rectangle, scores, relevance (the mean of the standardised scores) and tokens."""
    rectangles = cut(texture)
    scores = score(texture, rectangles, query, attention)
    relevance = standardise(scores.T).mean(1).tolist()
    tokens = allocate(relevance, len(rectangles) * MEAN_TOKENS if budget is None else budget)
    names = ("x", "y", "width", "height", "information", "salience", "match", "relevance", "tokens")
    return [dict(zip(names, (*r, *s, *rest))) for r, s, *rest in zip(rectangles, scores.T.tolist(), relevance, tokens)]


# ---- Tokens ----


def cells(patch):
    """As many rectangles as the patch has tokens, in rows of almost equal numbers: (x, y, x end, y end)."""
    x, y, width, height, n = (patch[name] for name in ("x", "y", "width", "height", "tokens"))
    rows = math.floor(math.sqrt(n) + 0.5)
    for row in range(rows):
        count = n * (row + 1) // rows - n * row // rows
        for i in range(count):
            yield x + width * i // count, y + height * row // rows, x + width * (i + 1) // count, y + height * (row + 1) // rows


def sample(texture, patches):
    """The means of all patches' cells, f32 [tokens, 13], and where each patch begins, int32 [patches + 1]."""
    tokens = [texture[:, y:y1, x:x1].mean((1, 2)) for patch in patches for x, y, x1, y1 in cells(patch)]
    lengths = torch.tensor([0] + [patch["tokens"] for patch in patches])
    return torch.stack(tokens), lengths.cumsum(0).int()


class Encoder(torch.nn.Module):
    """A layer of multi-query attention, in which a token sees the tokens of its own patch. All query heads share one key and value head."""

    def __init__(self, attention_varlen=ops.attention_varlen):
        super().__init__()
        self.attention_varlen = attention_varlen
        shapes = {"embed": (CHANNELS, DIM), "query": (DIM, DIM), "key": (DIM, HEAD_DIM), "value": (DIM, HEAD_DIM), "output": (DIM, DIM)}
        for seed, (name, shape) in enumerate(shapes.items(), start=4):
            self.register_parameter(name, torch.nn.Parameter(weight(seed, *shape)))

    def forward(self, tokens, cu_seqlens):
        x = tokens @ self.embed
        h = F.rms_norm(x, (DIM,), eps=1e-5)
        q = (h @ self.query).view(-1, HEADS, HEAD_DIM)
        k, v = (h @ self.key)[:, None], (h @ self.value)[:, None]
        return x + self.attention_varlen(q, k, v, cu_seqlens, cu_seqlens).reshape(-1, DIM) @ self.output


# ---- The program ----


def to_page(image, patches):
    """page.html with the plan and the image in it."""
    height, width, _ = image.shape
    page = (pathlib.Path(__file__).parent / "page.html").read_text()
    page = page.replace("{{plan}}", json.dumps({"width": width, "height": height, "patches": patches}))
    return page.replace("{{pixels}}", base64.b64encode(image.numpy().tobytes()).decode())


def colours(text):
    found = [tuple(bytes.fromhex(colour)) for colour in text.split(",")]
    if any(len(colour) != 3 for colour in found):
        raise ValueError
    return found


def fixation(text):
    x, y = map(float, text.split(","))
    if not (0 <= x <= 1 and 0 <= y <= 1):
        raise ValueError
    return x, y


def main():
    parser = argparse.ArgumentParser(description="Divides an image's patches into tokens where they matter, and encodes them.")
    parser.add_argument("--image", help="a binary PPM file; default: a drawing of a lighthouse")
    parser.add_argument("--query", type=colours, default=LOOKED_FOR, help="the colours looked for: RRGGBB,...")
    parser.add_argument(
        "--fixation", type=fixation, default=(0.5, 0.5), help="where the viewer looks: X,Y as fractions of width and height"
    )
    parser.add_argument("--budget", type=int, help=f"tokens in all; default: {MEAN_TOKENS} for each patch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--page", help="writes the page to this file")
    arguments = parser.parse_args()

    try:
        image = read_ppm(arguments.image) if arguments.image else lighthouse()
        texture = texture_of(image, arguments.fixation)
        patches = plan(texture, arguments.query, arguments.budget)
    except (OSError, ValueError) as error:
        sys.exit(f"arr_coc.py: {error}")

    device = torch.device(arguments.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    tokens, cu_seqlens = sample(texture, patches)
    with torch.no_grad():
        embeddings = Encoder().to(device, dtype)(tokens.to(device, dtype), cu_seqlens.to(device))

    if arguments.page:
        pathlib.Path(arguments.page).write_text(to_page(image, patches))
    for patch in patches:
        print("\n" * (patch["x"] == 0 and patch["y"] > 0) + f"{patch['tokens']:5}", end="")
    print(f"\n{image.shape[1]} x {image.shape[0]} pixels, {len(patches)} patches, {list(embeddings.shape)} {embeddings.dtype} on {device}")


if __name__ == "__main__":
    main()
