"""llama.cpp's slot actions over HTTP: a session saved by one process goes on in another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx

from tests.checkpoints import TINY_GGUF, tiny_cases
from tests.clients.conftest import Process, serve

FLAGS = (str(TINY_GGUF), "--max-context", "1024", "--max-concurrency", "2", "--deterministic")
PROMPT = (tiny_cases()[0]["prompt_ids"] * 20)[:300]


def act(server: Process, action: str, slot: object = 0, **body: Any) -> httpx.Response:
    return server.http.post(f"/slots/{slot}", params={"action": action}, json=body)


def complete(server: Process, prompt: list[int]) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": 20, "temperature": 0.8, "seed": 5, "n_probs": 5, "return_tokens": True}
    found: dict[str, Any] = server.http.post("/completion", json=body).json()
    return found


def test_a_saved_session_goes_on_in_another_process_bit_for_bit(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "yet"
    with serve(*FLAGS, "--slot-save-path", str(folder)) as server:
        first = complete(server, PROMPT)
        slot = server.http.get("/slots").json()[first["id_slot"]]
        assert slot["retained"] and slot["n_retained"] == 300
        saved = act(server, "save", first["id_slot"], filename="Mine.bin", if_digest=slot["session_digest"]).json()
        assert (saved["id_slot"], saved["filename"], saved["n_saved"]) == (first["id_slot"], "mine.bin", 256)
        assert saved["n_written"] == (folder / "mine.bin").stat().st_size and saved["timings"]["save_ms"] > 0
        cold = complete(server, [*PROMPT[:100], *PROMPT[50:]])
        assert cold["timings"]["cache_n"] <= 64
        assert act(server, "erase", first["id_slot"]).json()["n_erased"] > 0
        assert act(server, "erase", first["id_slot"]).json() == {"id_slot": first["id_slot"], "n_erased": 0}
        wanted = complete(server, PROMPT)
        assert wanted["tokens"] == first["tokens"]
        assert server.stop() == 0
    with serve(*FLAGS, "--slot-save-path", str(folder)) as server:
        restored = act(server, "restore", 1, filename="mine.bin").json()
        assert (restored["id_slot"], restored["n_restored"], restored["n_read"]) == (1, 256, saved["n_written"])
        assert restored["session_digest"] == saved["session_digest"]
        assert server.http.get("/slots").json()[1]["session_digest"] == saved["session_digest"]
        again = complete(server, PROMPT)
        assert again["timings"]["cache_n"] == 256 and again["timings"]["prompt_n"] == 44
        assert again["tokens"] == first["tokens"]
        assert again["completion_probabilities"] == first["completion_probabilities"]
        assert server.idle() and server.stop() == 0
