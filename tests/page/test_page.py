"""The page of `tilewave serve` in a browser: tests/page/run.sh."""

import base64
import json
import re
import urllib.request
import uuid

import pytest
from conftest import ROOT, SAMPLES, SPOKEN, TEXTS, Server, text_of, transcript, wait_until_done
from playwright.sync_api import expect

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "device_scale_factor": 2}


def choose(page, *files):
    page.set_input_files("#file", files)


def post(url, file, **fields):
    """What the server answers to a program that sends the file."""
    boundary = uuid.uuid4().hex
    body = b""
    for name, value in fields.items():
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    body += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{file.name}"\r\n\r\n'.encode()
    body += file.read_bytes() + f"\r\n--{boundary}--\r\n".encode()
    request = urllib.request.Request(
        f"{url}/v1/audio/transcriptions", body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as response:
        return response.read().decode()


# ---- Text -------------------------------------------------------------------------------------------------------------------------------


def test_samples(page):
    for name, text in TEXTS.items():
        page.get_by_role("button", name=name.removesuffix(".wav")).click()
        expect(page.get_by_role("log")).to_have_text(text)
        wait_until_done(page)
        assert text_of(page) == text
        expect(page.get_by_role("status")).to_have_text(re.compile(rf"^{len(text.split())} words in [\d.]+ s of audio, transcribed in"))
        expect(page.get_by_role("button", name="Play", exact=True)).to_have_attribute("aria-disabled", "false")
        assert page.locator("#wave rect").count() == page.locator("#transcript li").count() >= 1
        expect(page.locator("#wave .bars").first).to_have_attribute("d", re.compile("^M.{1000,}"))


def test_a_file_that_is_chosen(page):
    for line in (ROOT / "tests/data/digits/transcripts.txt").read_text().splitlines()[:2]:
        name, text = line.split("\t")
        choose(page, ROOT / "tests/data/digits" / name)
        expect(page.get_by_role("log")).to_have_text(text)
        assert text_of(page) == text


def test_a_file_that_is_dropped(page):
    data = page.evaluate_handle(
        """([bytes, name]) => {
          const data = new DataTransfer();
          data.items.add(new File([Uint8Array.from(atob(bytes), c => c.charCodeAt(0))], name, { type: "audio/wav" }));
          return data;
        }""",
        [base64.b64encode((SAMPLES / "digits-3.wav").read_bytes()).decode(), "digits-3.wav"],
    )
    page.dispatch_event("body", "dragover", {"dataTransfer": data})
    expect(page.locator("#drop-target")).to_be_visible()
    page.dispatch_event("body", "drop", {"dataTransfer": data})
    expect(page.locator("#drop-target")).to_be_hidden()
    wait_until_done(page)
    assert text_of(page) == TEXTS["digits-3.wav"]


def test_two_files_at_once_are_refused(page):
    page.evaluate("transcribeFiles([new File(['a'], 'a.wav'), new File(['b'], 'b.wav')])")
    expect(page.get_by_role("alert")).to_contain_text("one file at a time")


def test_text_that_is_not_complete_is_marked(page):
    page.evaluate(
        """transcript.show([{ begin: 0, end: 1, text: "one two", done: true }, { begin: 2, end: null, text: "three", done: false }])"""
    )
    expect(transcript(page)).to_have_text(["one two", "three"])
    expect(page.locator("#transcript li").first).not_to_have_class(re.compile("unfinished"))
    expect(page.locator("#transcript li").last).to_have_class(re.compile("unfinished"))


def test_markup_in_text_is_text(page):
    nasty = "<img src=x onerror=alert(1)>&amp;"
    page.route("**/v1/audio/transcriptions", lambda route: answer(route, nasty))
    page.set_input_files("#file", [{"name": f"{nasty}.wav", "mimeType": "audio/wav", "buffer": (SAMPLES / SPOKEN).read_bytes()}])
    wait_until_done(page)
    assert text_of(page) == nasty
    assert page.locator("img").count() == 0


# ---- Microphone -------------------------------------------------------------------------------------------------------------------------


def test_recording_shows_text_while_somebody_speaks(page):
    page.get_by_role("button", name="Record", exact=True).click()
    expect(page.get_by_role("status")).to_contain_text("Listening")
    expect(transcript(page).first).to_have_text(re.compile("eight"))
    page.wait_for_timeout(4000)  # the sample has 3.9 s
    expect(page.get_by_role("button", name="Stop recording")).to_be_visible()
    page.keyboard.press("Escape")
    wait_until_done(page)
    assert text_of(page) == TEXTS[SPOKEN]
    assert " ".join(page.locator("#spoken p").all_inner_texts()) == TEXTS[SPOKEN]  # each segment once
    expect(page.get_by_role("button", name="Record", exact=True)).to_be_visible()
    assert float(page.get_by_role("slider").get_attribute("aria-valuemax")) > 3.9
    assert page.locator("#wave rect").count() >= 1


def test_what_the_server_says_while_somebody_speaks(open_page):
    """Against a server that this test plays, so that every event comes at a known time."""
    sockets, heard = [], []

    def tell(kind, **members):
        sockets[0].send(json.dumps({"type": kind, **members}))

    def hear(message):
        heard.append(json.loads(message))
        if heard[-1]["type"] == "input_audio_buffer.commit":
            tell("error", error={"code": "input_audio_buffer_commit_empty", "message": "nothing to commit"})
        if heard[-1]["type"] == "input_audio_buffer.clear":
            tell("input_audio_buffer.cleared")

    def play_server(page):
        page.route_web_socket("**/v1/realtime*", lambda socket: (sockets.append(socket), socket.on_message(hear)))

    page = open_page(before=play_server)
    line = page.locator("#transcript li")
    page.get_by_role("button", name="Record", exact=True).click()
    while len(heard) < 12:
        page.wait_for_timeout(50)
    assert heard[0]["session"]["audio"]["input"]["format"] == {"type": "audio/pcm", "rate": 16000}
    assert [event["type"] for event in heard[1:]] == ["input_audio_buffer.append"] * (len(heard) - 1)
    assert len(base64.b64decode(heard[1]["audio"])) == 3200
    tell("input_audio_buffer.speech_started", item_id="a", audio_start_ms=200)
    for delta, text in (("one", "one"), (" two", "one two")):
        tell("conversation.item.input_audio_transcription.delta", item_id="a", delta=delta)
        expect(line).to_have_text("0:00" + text)
        expect(line).to_have_class("unfinished")
    tell("input_audio_buffer.speech_stopped", item_id="a", audio_end_ms=900)
    tell("input_audio_buffer.committed", item_id="a")
    page.get_by_role("button", name="Stop recording").click()
    expect(page.get_by_role("status")).to_have_text("Transcribing")
    page.wait_for_timeout(300)
    expect(page.get_by_role("status")).to_have_text("Transcribing")  # the text of an item is missing
    tell("conversation.item.input_audio_transcription.completed", item_id="a", transcript="one two three")
    wait_until_done(page)
    expect(line).to_have_text("0:00one two three")
    expect(page.get_by_role("status")).to_have_text(re.compile("^3 words in"))
    assert page.evaluate("transcript.segments") == [{"begin": 0.2, "end": 0.9, "text": "one two three", "done": True}]


def test_recording_without_live_text(open_page):
    """Where a proxy lets no WebSocket through, and in a browser without AudioWorklet, the recording is uploaded."""
    def refuse(page):
        page.route_web_socket("**/v1/realtime*", lambda socket: socket.close())

    proxied = open_page(before=refuse)
    old = open_page(before=lambda page: page.add_init_script("delete window.AudioWorkletNode"))
    for page in (proxied, old):
        page.get_by_role("button", name="Record", exact=True).click()
        expect(page.get_by_role("status")).to_contain_text("Text comes after the recording")
    old.wait_for_timeout(4500)
    for page in (proxied, old):
        page.get_by_role("button", name="Stop recording").click()
        wait_until_done(page)
        assert text_of(page) == TEXTS[SPOKEN]


def test_the_audio_thread_resamples(page):
    """A tone below 8 kHz stays what it is, one above is gone."""

    def resampled(rate, hertz):
        return page.evaluate(
            """async ([rate, hertz]) => {
              const context = new OfflineAudioContext(1, rate, rate), pieces = [];
              await context.audioWorklet.addModule(URL.createObjectURL(new Blob([`(${audioThread})()`], { type: "text/javascript" })));
              const node = new AudioWorkletNode(context, "capture", { numberOfOutputs: 1 });
              node.port.onmessage = ({ data }) => data && pieces.push(...data);
              const buffer = new AudioBuffer({ length: rate, sampleRate: rate });
              buffer.getChannelData(0).forEach((_, i, data) => { data[i] = 0.5 * Math.sin(2 * Math.PI * hertz * i / rate); });
              const tone = new AudioBufferSourceNode(context, { buffer });
              tone.connect(node).connect(context.destination);
              tone.start();
              await context.startRendering();
              await new Promise(resolve => setTimeout(resolve, 50));
              // Fits a tone of that frequency to 0.75 s, whole periods. What is left is noise.
              const middle = pieces.slice(2000, 14000).map(x => x / 16384);
              const mean = f => middle.reduce((sum, x, i) => sum + f(x, i), 0) / middle.length;
              const angle = i => 2 * Math.PI * hertz * i / 16000;
              const a = 2 * mean((x, i) => x * Math.cos(angle(i))), b = 2 * mean((x, i) => x * Math.sin(angle(i)));
              const power = mean(x => x * x);
              return { count: pieces.length, amplitude: Math.sqrt(2 * power), noise: Math.sqrt(Math.max(0, power - (a * a + b * b) / 2)) };
            }""",
            [rate, hertz],
        )

    for rate in (16000, 44100, 48000, 96000):
        for hertz in (200, 6500):
            tone = resampled(rate, hertz)
            assert tone["count"] >= 14400
            assert abs(tone["amplitude"] - 1) < 0.01, (rate, hertz)
            assert tone["noise"] < 0.001, (rate, hertz)
        assert rate < 20000 or resampled(rate, 9500)["amplitude"] < 0.001


def test_microphone_errors(page):
    messages = {"NotAllowedError": "does not let this page use", "NotFoundError": "No microphone", "NotReadableError": "Another program"}
    for name, message in messages.items():
        page.evaluate("name => { navigator.mediaDevices.getUserMedia = async () => { throw new DOMException('', name); }; }", name)
        page.get_by_role("button", name="Record", exact=True).click()
        expect(page.get_by_role("alert")).to_contain_text(message)
        expect(page.get_by_role("button", name="Try again")).to_be_visible()
    page.evaluate("Object.defineProperty(navigator, 'mediaDevices', { value: undefined })")  # as on a page without HTTPS
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("alert")).to_contain_text("over HTTPS")
    expect(page.get_by_role("button", name="Record", exact=True)).to_have_attribute("aria-disabled", "false")


# ---- Player -----------------------------------------------------------------------------------------------------------------------------


def three_segments(page):
    """A transcript of digits-3.wav with segments at known times, whatever the server makes of it."""
    segments = [(0.5, 2, "four three"), (2.5, 4, "seven five"), (5, 6.5, "seven four")]
    page.route("**/v1/audio/transcriptions", lambda route: answer(route, "four three seven five seven four", segments))
    choose(page, SAMPLES / "digits-3.wav")
    wait_until_done(page)
    expect(page.get_by_role("slider")).to_have_attribute("aria-valuemax", "7.1")


def position(page):
    return page.evaluate("player.audio.currentTime")


def test_a_click_on_a_segment_plays_from_there(page):
    three_segments(page)
    wave = page.get_by_role("slider").bounding_box()
    for rect, begin, end in zip(page.locator("#wave rect").all(), (0.5, 2.5, 5), (2, 4, 6.5)):
        box = rect.bounding_box()
        assert (box["x"] - wave["x"]) / wave["width"] * 7.1 == pytest.approx(begin, abs=0.05)
        assert (box["x"] + box["width"] - wave["x"]) / wave["width"] * 7.1 == pytest.approx(end, abs=0.05)
    page.mouse.click(wave["x"] + wave["width"] * 3.5 / 7.1, wave["y"] + 20)
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    assert 2.5 <= position(page) < 3.4
    expect(page.locator("#transcript li").nth(1)).to_have_class(re.compile("current"))
    page.get_by_role("button", name="seven four").click()
    assert 5 <= position(page) < 6
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()


def test_the_keyboard_reaches_everything(page):
    """Everything is done here without a mouse."""
    expect(page.locator(".sample")).to_have_count(3)

    def tab_to(name, key="Tab"):
        for _ in range(30):
            page.keyboard.press(key)
            if name in page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"):
                return
        raise AssertionError(f"the tabulator does not reach {name}")

    tab_to("Dark theme")
    page.keyboard.press("Space")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    tab_to("Choose a file")
    page.evaluate("$('file').addEventListener('click', event => { event.preventDefault(); root.dataset.asked = true; })")
    page.keyboard.press("Enter")
    assert page.evaluate("root.dataset.asked") == "true"
    tab_to("digits-1")
    page.keyboard.press("Enter")
    wait_until_done(page)
    assert page.evaluate("document.activeElement.textContent") == "digits-1"  # the focus stays where it was
    assert text_of(page) == TEXTS["digits-1.wav"]
    tab_to("Position")
    outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert position(page) == pytest.approx(2, abs=0.01)
    expect(page.get_by_role("slider")).to_have_attribute("aria-valuetext", "0:02 of 0:06")
    page.keyboard.press("Home")
    assert position(page) == 0
    page.keyboard.press("Space")
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Play", exact=True)).to_be_visible()
    tab_to("Download as JSON")
    with page.expect_download() as download:
        page.keyboard.press("Enter")
    assert download.value.suggested_filename == "digits-1.json"
    tab_to("Record", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop recording")).to_be_focused()
    expect(page.get_by_role("status")).to_contain_text("Listening")
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Record", exact=True)).to_be_focused()


# ---- Copies -----------------------------------------------------------------------------------------------------------------------------


def downloaded(page, label):
    with page.expect_download() as download:
        page.get_by_role("button", name=label).click()
    return download.value.suggested_filename, open(download.value.path(), encoding="utf-8").read()


def test_downloads_are_what_the_server_writes(page, server):
    sample = SAMPLES / "digits-3.wav"
    choose(page, sample)
    wait_until_done(page)
    assert downloaded(page, "Download as text") == ("digits-3.txt", TEXTS[sample.name] + "\n")
    assert downloaded(page, "Download as SubRip") == ("digits-3.srt", post(server.url, sample, model="digits", response_format="srt"))
    assert downloaded(page, "Download as WebVTT") == ("digits-3.vtt", post(server.url, sample, model="digits", response_format="vtt"))
    name, text = downloaded(page, "Download as JSON")
    assert name == "digits-3.json"
    ours, theirs = json.loads(text), json.loads(post(server.url, sample, model="digits", response_format="verbose_json"))
    assert ours["text"] == theirs["text"] == TEXTS[sample.name]
    assert ours["duration"] == pytest.approx(theirs["duration"], abs=0.01)
    keys = ("id", "start", "end", "text")
    assert [[s[key] for key in keys] for s in ours["segments"]] == [[s[key] for key in keys] for s in theirs["segments"]]


def test_subtitles_of_odd_text_are_valid(page):
    page.evaluate(
        """transcript.show([{ begin: 0, end: 0, text: "a --> b\\nc", done: true }, { begin: 0, end: 3725.5, text: "<i> & d", done: true },
                            { begin: 4000, end: 4001, text: "", done: true }])"""
    )
    assert page.evaluate("formats.srt.write()") == (
        "1\n00:00:00,000 --> 00:00:00,001\na -> b c\n\n2\n00:00:00,000 --> 01:02:05,500\n<i> & d\n\n"
    )
    assert page.evaluate("formats.vtt.write()") == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:00.001\na --&gt; b c\n\n00:00:00.000 --> 01:02:05.500\n&lt;i&gt; &amp; d\n\n"
    )


def test_copy(open_page):
    page = open_page(permissions=["clipboard-read", "clipboard-write"])
    for name in ("digits-2", "digits-1"):
        page.get_by_role("button", name=name).click()
        expect(page.get_by_role("log")).to_have_text(TEXTS[name + ".wav"])
        wait_until_done(page)
        page.get_by_role("button", name="Copy").click()
        expect(page.get_by_role("status")).to_have_text("Copied.")
        assert page.evaluate("navigator.clipboard.readText()") == TEXTS[name + ".wav"]
        page.evaluate("delete Clipboard.prototype.writeText")  # as on a page without HTTPS


# ---- Errors -----------------------------------------------------------------------------------------------------------------------------


def answer(route, text, segments=None):
    """An answer as the server gives it."""
    segments = [{"id": i, "start": b, "end": e, "text": t} for i, (b, e, t) in enumerate(segments or [(0.2, 1.5, text)])]
    done = {"type": "transcript.text.done", "text": text, "duration": 7.1, "segments": segments}
    events = [{"type": "transcript.text.delta", "delta": text}, done]
    route.fulfill(status=200, content_type="text/event-stream", body="".join(f"data: {json.dumps(event)}\n\n" for event in events))


def refuse(route, status, message, **headers):
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error", "param": None, "code": None}})
    route.fulfill(status=status, headers=headers, content_type="application/json", body=body)


def test_errors_of_the_server_are_shown(open_page):
    page = open_page(expected_messages="400|413|500")
    again = page.get_by_role("button", name="Try again")
    for status, message, shown in (
        (400, "file: no audio", "file: no audio"),
        (413, "at most 100 MB are accepted", "at most 100 MB are accepted"),
        (500, "out of memory", "The server reports an error: out of memory"),
    ):
        page.route("**/v1/audio/transcriptions", lambda route: refuse(route, status, message))
        choose(page, SAMPLES / SPOKEN)
        expect(page.get_by_role("alert")).to_contain_text(shown)
        expect(again).to_be_visible(visible=status == 500)
        if status != 500:
            page.get_by_role("button", name="Close this message").click()
            expect(page.get_by_role("button", name="Record", exact=True)).to_be_focused()
            expect(page.get_by_role("alert")).to_be_hidden()
        page.unroute("**/v1/audio/transcriptions")
    again.click()
    wait_until_done(page)
    assert text_of(page) == TEXTS[SPOKEN]
    expect(page.get_by_role("alert")).to_be_hidden()


def test_what_is_no_recording(open_page):
    page = open_page(expected_messages="400")
    page.set_input_files("#file", [{"name": "notes.txt", "mimeType": "text/plain", "buffer": b"not audio"}])
    expect(page.get_by_role("alert")).to_contain_text("no audio that can be read")
    expect(page.get_by_role("region", name="Transcript")).to_be_hidden()
    choose(page, SAMPLES / SPOKEN)
    wait_until_done(page)
    expect(page.get_by_role("region", name="Transcript")).to_be_visible()


def test_a_busy_server_is_asked_again(open_page):
    page = open_page(expected_messages="429")
    asked = []

    def once(route):
        asked.append(route)
        refuse(route, 429, "The queue is full.", **{"Retry-After": "1"}) if len(asked) == 1 else route.continue_()

    page.route("**/v1/audio/transcriptions", once)
    choose(page, SAMPLES / SPOKEN)
    expect(page.get_by_role("status")).to_have_text("The queue is full. Trying again in 1 second.")
    wait_until_done(page)
    assert text_of(page) == TEXTS[SPOKEN]
    assert len(asked) == 2


def test_an_answer_that_breaks_off(page):
    for event, shown in (
        ({"type": "error", "error": {"message": "the model failed"}}, "the model failed"),
        ({"type": "transcript.text.delta", "delta": "one"}, "ended its answer early"),
    ):
        page.route(
            "**/v1/audio/transcriptions",
            lambda route: route.fulfill(status=200, content_type="text/event-stream", body=f"data: {json.dumps(event)}\n\n"),
        )
        choose(page, SAMPLES / SPOKEN)
        expect(page.get_by_role("alert")).to_contain_text(shown)
        page.unroute("**/v1/audio/transcriptions")


def test_a_server_that_is_gone(open_page):
    page = open_page(expected_messages="ERR_CONNECTION_REFUSED")
    expect(page.locator("#model")).not_to_be_empty()
    page.route("**/*", lambda route: route.abort("connectionrefused"))
    choose(page, SAMPLES / SPOKEN)
    expect(page.get_by_role("alert")).to_contain_text("The connection to the server was lost")
    page.get_by_role("button", name="digits-1").click()
    expect(page.get_by_role("alert")).to_contain_text("The server does not answer")


def test_an_upload_shows_its_progress_and_can_be_cancelled(page):
    network = page.context.new_cdp_session(page)
    slow = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 400_000}
    network.send("Network.emulateNetworkConditions", slow)
    choose(page, SAMPLES / "digits-3.wav")
    expect(page.get_by_role("status")).to_have_text(re.compile(r"^Uploading digits-3.wav: [1-9]\d? %$"))
    assert 0 < page.get_by_role("progressbar").evaluate("bar => bar.value") < 1
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("status")).to_have_text("Stopped.")
    expect(page.get_by_role("progressbar")).to_be_hidden()


def test_the_key_is_asked_for_when_the_server_wants_one(open_page, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("right-key\n")
    keys.chmod(0o600)
    server = Server("--api-keys", keys)
    try:
        page = open_page(url=server.url, expected_messages="401")
        field = page.get_by_label("This server asks for an API key.")
        expect(field).to_be_focused()
        field.fill("wrong-key")
        page.keyboard.press("Enter")
        field = page.get_by_label("This server refused the API key. Enter another one.")
        expect(field).to_be_focused()
        field.fill("right-key")
        page.keyboard.press("Enter")
        expect(page.locator("#key-form")).to_be_hidden()
        expect(page.locator("#model")).not_to_be_empty()
        page.get_by_role("button", name="digits-2").click()
        wait_until_done(page)
        assert text_of(page) == TEXTS["digits-2.wav"]
        page.reload()  # the key is kept for the session
        expect(page.locator("#model")).not_to_be_empty()
        with page.expect_websocket() as opened:
            page.get_by_role("button", name="Record", exact=True).click()
            with opened.value.expect_event("framereceived"):
                pass
        page.get_by_role("button", name="Stop recording").click()
        expect(page.get_by_role("button", name="Record", exact=True)).to_have_attribute("aria-disabled", "false")
        page.context.close()
    finally:
        server.close()


# ---- Looks ------------------------------------------------------------------------------------------------------------------------------

CONTRASTS = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = color => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = color;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const background = node => {
    for (; node; node = node.parentElement) {
      const color = rgba(getComputedStyle(node).backgroundColor);
      if (color[3] === 255) return color;
    }
  };
  const all = [];
  for (const node of document.body.querySelectorAll("*")) {
    if (!node.checkVisibility() || node.closest("[aria-disabled=true]")) continue;
    const style = getComputedStyle(node), what = `${node.tagName}#${node.id}.${node.className.baseVal ?? node.className}`;
    const text = [...node.childNodes].some(child => child.nodeType === Node.TEXT_NODE && child.data.trim());
    if (text) all.push({ what, least: 4.5, contrast: contrast(rgba(style.color), background(node)) });
    if (node.matches("button, input") && parseFloat(style.borderTopWidth) && rgba(style.borderTopColor)[3])
      all.push({ what: what + " border", least: 3, contrast: contrast(rgba(style.borderTopColor), background(node.parentElement)) });
    if (node.matches("svg")) all.push({ what: what + " symbol", least: 3, contrast: contrast(rgba(style.color), background(node)) });
  }
  return all;
}"""


def test_contrast(page):
    three_segments(page)
    page.get_by_role("button", name="seven five").click()  # the current segment has another background
    page.evaluate("showError(new Failure('Something to read'), () => {}), askForKey('A question', () => {})")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        contrasts = page.evaluate(CONTRASTS)
        assert len(contrasts) > 40
        assert [c for c in contrasts if c["contrast"] < c["least"]] == []
        lightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
        assert (min(lightness) > 200) if scheme == "light" else (max(lightness) < 50)


def test_the_theme_can_be_chosen(page):
    button = page.get_by_role("button", name="Dark theme")
    expect(button).to_have_attribute("aria-pressed", "false")
    button.click()
    expect(button).to_have_attribute("aria-pressed", "true")
    page.reload()
    expect(button).to_have_attribute("aria-pressed", "true")
    assert max(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")) < 50


def test_every_control_has_a_name(page):
    """What a screen reader says."""
    three_segments(page)
    page.evaluate("showError(new Failure('Something to read'), () => {}), askForKey('A question', () => {})")
    tree = page.locator("body").aria_snapshot()
    for role in ("button", "textbox", "slider", "group", "region"):
        assert not re.search(rf"^\s*- {role}(?! \")", tree, re.MULTILINE), tree
    landmarks = ["banner", "main", "contentinfo", 'heading "Tilewave" [level=1]']
    for expected in landmarks + ['button "Record"', 'group "Download"', 'slider "Position in the recording"', 'textbox "A question"']:
        assert expected in tree
    assert page.locator("html").get_attribute("lang") == "en"
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map(element => element.id)")
    assert len(ids) == len(set(ids))


def test_a_phone(open_page):
    page = open_page(**PHONE)
    three_segments(page)
    page.evaluate("showError(new Failure('Something to read'), () => {}), askForKey('A question', () => {})")
    for control in page.locator("button:visible, input:visible").all():
        box = control.bounding_box()
        assert box["width"] >= 44 and box["height"] >= 44, control
    for width in (390, 320):
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        text, cross = page.locator("#error-text").bounding_box(), page.locator("#dismiss").bounding_box()
        assert text["x"] + text["width"] <= cross["x"] and cross["y"] < text["y"] + text["height"]
        # Everything above the transcript begins at the left margin; the glow of a recording stays within it.
        assert {round(page.locator(name).bounding_box()["x"]) for name in ("#record", "#samples > span", "#error", "#progress")} == {20}
        page.evaluate("document.querySelector('#record').style.setProperty('--level', 1)")
        expect(page.locator("#record")).to_have_css("box-shadow", re.compile(r" 8px$"))


# ---- The file ---------------------------------------------------------------------------------------------------------------------------


def test_the_server_protects_the_page(server):
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(server.url + "/") as response:
        policy, body = response.headers["Content-Security-Policy"], response.read().decode()
    assert body == (ROOT / "apps/serve/page/index.html").read_text()
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert body.count("<script>") == body.count("<style>") == 1
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?(https?:)?//""", body)
