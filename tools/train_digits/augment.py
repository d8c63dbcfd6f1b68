"""Training batches, composed and augmented on the device: strings of digits with pauses, speed, room, channel, noise, level; log-mel features.

Every clip's place in the string is known, so that a batch also carries, for every position of the encoder, which digit is spoken there.
"""

import math
from dataclasses import dataclass

import torch
from transformers import WhisperFeatureExtractor

from clips import RATE, is_synthetic

HOP, ENCODER_STEP, TOKEN_STEP = 160, 320, 1280  # samples in a mel frame, an encoder position, an audio token
MOST_DIGITS = 12
NO_DIGIT, FRAME_CLASSES = 20, 21  # a digit's first half is class d, its second half 10 + d
IGNORE = -100


@dataclass
class Batch:
    features: torch.Tensor  # [batch, 128, frames] log-mel
    audio_tokens: torch.Tensor  # [batch] how many of the window's tokens are audio
    digits: torch.Tensor  # [batch, 12], IGNORE beyond the last
    counts: torch.Tensor  # [batch] digits in the string
    frame_classes: torch.Tensor  # [batch, frames / 2]
    finished: torch.Tensor  # [batch, frames / 8] digits that ended before the end of this token


class LogMel:
    """Whisper's log-mel features; its filters optionally along a warped frequency axis, which moves formants like another vocal tract."""

    WARPS = torch.exp(torch.linspace(-0.17, 0.17, 35))

    def __init__(self, device):
        extractor = WhisperFeatureExtractor(feature_size=128)
        filters = torch.tensor(extractor.mel_filters.T, dtype=torch.float32)  # [128, 201]
        bins = torch.arange(201, dtype=torch.float32)
        warped = []
        for warp in self.WARPS:  # a component at bin f counts as one at bin f * warp
            source = (bins * warp).clamp(max=200)
            low = source.floor().long().clamp(max=199)
            part = source - low
            warped.append(filters[:, low] * (1 - part) + filters[:, low + 1] * part)
        self.filters, self.warped = filters.to(device), torch.stack(warped).to(device)
        self.window = torch.hann_window(400, device=device)

    def __call__(self, samples, warps=None):
        """samples [batch, n] -> [batch, 128, n / 160]; warps [batch], indices into WARPS."""
        power = torch.stft(samples, 400, HOP, window=self.window, return_complex=True)[..., :-1].abs() ** 2
        mel = (self.filters if warps is None else self.warped[warps]) @ power
        log = mel.clamp(min=1e-10).log10()
        log = torch.maximum(log, log.amax((1, 2), keepdim=True) - 8)
        return (log + 4) / 4


def audio_token_count(samples):
    """How many tokens the model keeps for this many samples (a tensor)."""
    frames = (samples + HOP - 1) // HOP
    return ((frames - 1) // 2 + 1 - 4) // 4 + 1


class Composer:
    """Draws batches from clips. Human and synthetic voices are drawn in the given proportion, voices of one kind equally often."""

    def __init__(self, clips, device, human=0.65, seed=0):
        self.device = device
        self.random = torch.Generator(device).manual_seed(seed)
        self.log_mel = LogMel(device)
        self.samples = torch.cat([torch.from_numpy(s) for s in clips.samples]).to(device)
        lengths = torch.tensor([len(s) for s in clips.samples])
        self.lengths = lengths.to(device)
        self.offsets = (lengths.cumsum(0) - lengths).to(device)
        self.labels = torch.full((len(lengths), 6), IGNORE)
        for i, digits in enumerate(clips.digits):
            self.labels[i, : len(digits)] = torch.tensor(digits)
        self.labels = self.labels.to(device)

        voices = sorted(set(clips.voices))
        singles = [[[] for _ in range(10)] for _ in voices]
        phrases = [[] for _ in voices]
        for i, (digits, voice) in enumerate(zip(clips.digits, clips.voices)):
            v = voices.index(voice)
            (singles[v][digits[0]] if len(digits) == 1 else phrases[v]).append(i)
        most = max(len(c) for voice in singles for c in voice)
        self.singles = torch.tensor([[(c * most)[:most] for c in voice] for voice in singles], device=device)  # [voices, 10, most]
        self.single_counts = torch.tensor([[len(c) for c in voice] for voice in singles], device=device)
        self.phrases = torch.tensor([((p or [0, 0]) * 2)[:2] for p in phrases], device=device)
        synthetic = torch.tensor([is_synthetic(v) for v in voices])
        self.synthetic = synthetic.to(device)
        weights = torch.where(synthetic, (1 - human) / synthetic.sum().clamp(min=1), human / (~synthetic).sum().clamp(min=1))
        self.voice_weights = weights.to(device)

    def uniform(self, low, high, *shape):
        return torch.rand(shape, generator=self.random, device=self.device) * (high - low) + low

    def integers(self, high, *shape):
        return torch.randint(high, shape, generator=self.random, device=self.device)

    def chance(self, probability, *shape):
        return self.uniform(0, 1, *shape) < probability

    def batch(self, size, seconds, silent=0.06):
        """`size` windows of `seconds` (the features' length; the audio in it is shorter); a part `silent` of them has no speech."""
        n, device = int(seconds * RATE), self.device
        most = min(MOST_DIGITS, max(1, int(seconds)))
        slots = torch.arange(most, device=device)

        # Which clips: one voice a string, another voice for each digit in a few; some strings repeat digits; some are phrases spoken as one.
        wanted = self.integers(most, size, 1) + 1
        wanted[self.chance(silent, size, 1)] = 0
        voice = torch.multinomial(self.voice_weights, size, True, generator=self.random)[:, None].expand(size, most)
        others = torch.multinomial(self.voice_weights, size * most, True, generator=self.random).view(size, most)
        voice = torch.where(self.chance(0.08, size, 1), others, voice)
        digit = self.integers(10, size, most)
        repeat = self.chance(0.2, size, 1) & self.chance(0.5, size, most)
        for k in range(1, most):
            digit[:, k] = torch.where(repeat[:, k], digit[:, k - 1], digit[:, k])
        count = self.single_counts[voice, digit]
        pick = torch.minimum((self.uniform(0, 1, size, most) * count).long(), count - 1)
        clip = self.singles[voice, digit, pick]
        phrase = self.chance(0.25, size, 1) & self.synthetic[voice[:, :1]] & (seconds > 5)
        clip = torch.where(phrase, self.phrases[voice[:, :1].expand(size, most), self.integers(2, size, most)], clip)
        wanted = torch.where(phrase, wanted.clamp(max=2), wanted)

        # When: speed (pitch and formants move with it), pauses of a scale of the string's own, silence before and after.
        speed = torch.exp(self.uniform(-0.18, 0.18, size, 1) + self.uniform(-0.04, 0.04, size, most))
        length = self.lengths[clip] / speed
        scale = torch.exp(self.uniform(math.log(0.03), math.log(1.2), size, 1))
        pause = scale * self.uniform(0.3, 1.2, size, most) * RATE
        lead = torch.where(self.chance(0.5, size, 1), self.uniform(0, 0.4, size, 1), self.uniform(0, 0.17 * seconds, size, 1)) * RATE
        end = lead + (length + pause).cumsum(1) - pause
        start = end - length
        kept = (slots < wanted) & (end < n)
        start = torch.where(kept, start, torch.full_like(start, 2.0 * n))
        last = torch.where(kept, end, lead).amax(1, keepdim=True)
        trail = torch.where(self.chance(0.5, size, 1), self.uniform(0, 0.4, size, 1), self.uniform(0, 0.17 * seconds, size, 1)) * RATE
        audio_length = (last + trail).clamp(min=RATE // 8, max=n)
        spoken = kept.any(1, keepdim=True)
        audio_length = torch.where(spoken, audio_length, self.uniform(RATE // 8, n, size, 1)).long()

        # Each output sample's slot and place in its clip, by linear interpolation.
        time = torch.arange(n, device=device, dtype=torch.float32).expand(size, n)
        slot = (torch.searchsorted(start.contiguous(), time.contiguous(), right=True) - 1).clamp(min=0)
        place = (time - start.gather(1, slot)) * speed.gather(1, slot)
        clip_length = self.lengths[clip].gather(1, slot)
        inside = (place >= 0) & (place < clip_length - 1)
        whole = torch.where(inside, place, torch.zeros_like(place)).long()
        at = self.offsets[clip].gather(1, slot) + whole
        gain = 10 ** (self.uniform(-4, 4, size, most) / 20)
        gain = gain / self.samples.abs().mean()  # near 1 on average; the string's level is set below
        fade = (torch.minimum(place, clip_length - place) / 64).clamp(0, 1)
        speech = torch.lerp(self.samples[at], self.samples[(at + 1).clamp(max=len(self.samples) - 1)], place - whole)
        speech = torch.where(inside, speech * fade * gain.gather(1, slot), torch.zeros_like(speech))
        del time, at, whole, fade

        # Frame classes, and how many digits have ended; unknown inside phrases.
        centre = torch.arange(ENCODER_STEP // 2, n, ENCODER_STEP, device=device)
        half = (place[:, centre] > clip_length[:, centre] / 2).long()
        classes = torch.where(inside[:, centre], digit.gather(1, slot[:, centre]) + 10 * half, torch.full_like(half, NO_DIGIT))
        classes = torch.where(phrase & inside[:, centre], torch.full_like(classes, IGNORE), classes)
        token_end = torch.arange(TOKEN_STEP, n + 1, TOKEN_STEP, device=device)
        finished = ((end[:, None, :] <= token_end[None, :, None]) & kept[:, None, :]).sum(-1)
        finished = torch.where(phrase, torch.full_like(finished, IGNORE), finished)
        labels = torch.where(kept[..., None], self.labels[clip], torch.full_like(self.labels[clip], IGNORE)).flatten(1)
        order = torch.argsort((labels == IGNORE).long(), dim=1, stable=True)
        digits = labels.gather(1, order)[:, :MOST_DIGITS]
        if digits.shape[1] < MOST_DIGITS:
            digits = torch.nn.functional.pad(digits, (0, MOST_DIGITS - digits.shape[1]), value=IGNORE)

        samples = self.channel(speech, inside, audio_length)
        features = self.log_mel(samples, self.integers(len(LogMel.WARPS), size))
        self.mask_bands(features)
        return Batch(features, audio_token_count(audio_length[:, 0]), digits, (digits != IGNORE).sum(1), classes, finished)

    def curve(self, bins, deviation, size):
        """Smooth random gains along the frequency axis, 0 to 8 kHz: a value each kHz, in dB."""
        points = deviation * torch.randn(size, 1, 9, generator=self.random, device=self.device)
        return 10 ** (torch.nn.functional.interpolate(points, bins, mode="linear", align_corners=True)[:, 0] / 20)

    def channel(self, speech, inside, audio_length):
        """Room, frequency response, noise, level and 16-bit rounding."""
        size, n = speech.shape
        device = self.device
        points = math.ceil((n + RATE // 2) / 20000) * 20000  # a length that FFTs like, longer than the string and the room's response
        bins = points // 2 + 1
        hertz = torch.linspace(0, RATE / 2, bins, device=device)

        decay = self.uniform(0.08, 0.7, size, 1)  # the time in which the room's response falls by 60 dB, s
        seconds = torch.arange(RATE // 2, device=device) / RATE
        room = torch.randn(size, RATE // 2, generator=self.random, device=device) * 10 ** (-3 * seconds / decay)
        room = room / room.norm(dim=1, keepdim=True) * 10 ** (-self.uniform(0, 20, size, 1) / 20) * self.chance(0.4, size, 1)
        room[:, 0] += 1
        response = torch.fft.rfft(room, points) * self.curve(bins, 4.0, size)
        low_pass = torch.where(self.chance(0.5, size, 1), self.uniform(2800, 7500, size, 1), torch.full((size, 1), 2e4, device=device))
        high_pass = torch.where(self.chance(0.35, size, 1), self.uniform(60, 400, size, 1), torch.full((size, 1), -1e3, device=device))
        response = response * torch.sigmoid((low_pass - hertz) / 80) * torch.sigmoid((hertz - high_pass) / 20)
        speech = torch.fft.irfft(torch.fft.rfft(speech, points) * response, points)[:, :n]

        slope = self.uniform(0, 2, size, 1)
        shape = (hertz.clamp(min=20) / 1000) ** (-slope / 2) * self.curve(bins, 5.0, size) * torch.where(
            self.chance(0.3, size, 1), torch.sigmoid((low_pass - hertz) / 80), torch.ones(size, 1, device=device)
        )
        noise = torch.view_as_complex(torch.randn(size, bins, 2, generator=self.random, device=device)) * shape
        hum = self.chance(0.1, size, 1) * self.chance(2e-4, size, bins) * self.uniform(5, 60, size, 1)
        noise = torch.fft.irfft(noise * (1 + hum), points)[:, :n]
        noise = noise / noise.norm(dim=1, keepdim=True).clamp(min=1e-9) * math.sqrt(n)
        swell = torch.nn.functional.interpolate(torch.randn(size, 1, 2 + n // RATE, generator=self.random, device=device), n, mode="linear")
        noise = noise * 10 ** (swell[:, 0] * 6 / 20 * self.chance(0.3, size, 1))

        spoken = inside.sum(1, keepdim=True)
        power = (speech.square() * inside).sum(1, keepdim=True) / spoken.clamp(min=1)
        below = 10 ** (-self.uniform(4, 50, size, 1) / 20) * self.chance(0.75, size, 1)
        samples = speech + noise * torch.where(spoken > 0, power.sqrt() * below, self.chance(0.8, size, 1).float())
        samples = samples * (torch.arange(n, device=device) < audio_length)
        # The level is the largest sample's; of windows without speech also far lower.
        level = 10 ** (torch.where(spoken > 0, self.uniform(-35, 3, size, 1), self.uniform(-90, 0, size, 1)) / 20)
        samples = samples / samples.abs().amax(1, keepdim=True).clamp(min=1e-9) * level
        return (samples * 32768).round().clamp(-32768, 32767) / 32768

    def mask_bands(self, features):
        """Takes a band of up to 16 mel bins out of every second window."""
        size = len(features)
        first, width = self.integers(128, size, 1), self.integers(17, size, 1) * self.chance(0.5, size, 1)
        bins = torch.arange(128, device=self.device)
        masked = (bins >= first) & (bins < first + width)
        features.copy_(torch.where(masked[..., None], features.amin((1, 2), keepdim=True), features))
