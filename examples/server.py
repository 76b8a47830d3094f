"""A small picture server: POST /pictures {"prompt": "digit three"} gives a PNG, GET /health says who draws.

    pip install fastapi uvicorn
    python examples/server.py --model digits --devices 2 --port 8000
    curl -s -X POST localhost:8000/pictures -H 'content-type: application/json' -d '{"prompt": "digit three"}' -o three.png

One process, one pipeline, its denoiser on `devices` ranks; pictures are drawn one at a time, and a few requests may wait their turn.
"""

from __future__ import annotations

import argparse
import io
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from fastapi import FastAPI, HTTPException, Response
from pydantic import BaseModel, Field

import purlin_diffusion
from purlin_core import PurlinError, ShapeError
from purlin_diffusion import ArgumentError, Handle, pipelines

BAD_REQUEST, UNPROCESSABLE, FAILED, BUSY = 400, 422, 500, 503


class Order(BaseModel):
    """What a client asks for."""

    prompt: str = Field(min_length=1, max_length=2000)
    seed: int = Field(default=0, ge=0, lt=2**63)
    steps: int | None = Field(default=None, ge=1, le=200)
    height: int | None = Field(default=None, ge=8, le=4096)
    width: int | None = Field(default=None, ge=8, le=4096)


@dataclass
class Studio:
    """A pipeline that is used by one request at a time; `places`: how many requests may be here, drawing and waiting."""

    pipe: Any
    handle: Handle
    defaults: dict[str, Any]
    places: threading.Semaphore
    turn: threading.Lock = field(default_factory=threading.Lock)
    pictures: int = 0

    def draw(self, order: Order) -> bytes:
        """Raises what the pipeline raises."""
        asked = {"num_inference_steps": order.steps, "height": order.height, "width": order.width}
        arguments = self.defaults | {name: value for name, value in asked.items() if value is not None}
        generator = torch.Generator().manual_seed(order.seed)
        with self.turn:
            image = self.pipe(order.prompt, generator=generator, **arguments).images[0]
            self.pictures += 1
        png = io.BytesIO()
        image.save(png, "PNG")
        return png.getvalue()

    @contextmanager
    def place(self) -> Iterator[None]:
        if not self.places.acquire(blocking=False):
            raise HTTPException(BUSY, "Too many pictures are waiting. Try again soon.", headers={"Retry-After": "5"})
        try:
            yield
        finally:
            self.places.release()


def create(model: str = "digits", devices: int | list[str] = 2, *, device: str = "cpu", waiting: int = 8) -> FastAPI:
    """The application. It loads the pipeline to `device` when it starts, and ends the ranks when it stops: at Ctrl-C too."""
    studio: Studio | None = None

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        nonlocal studio
        pipe = pipelines.load(model, device=device)
        pipe.set_progress_bar_config(disable=True)
        handle = purlin_diffusion.parallelize(pipe, devices=devices)
        studio = Studio(pipe, handle, pipelines.defaults(model), threading.Semaphore(waiting))
        try:
            yield
        finally:
            handle.undo()

    app = FastAPI(title="pictures", lifespan=life)

    @app.get("/health")
    def health() -> dict[str, Any]:
        assert studio is not None
        handle = studio.handle
        return {"ranks": handle.ranks, "route": handle.route, "pictures": studio.pictures, "busy": studio.turn.locked()}

    @app.post("/pictures", response_class=Response)
    def pictures(order: Order) -> Response:  # not async: it runs on a thread, and the server goes on answering
        assert studio is not None
        with studio.place():
            try:
                return Response(studio.draw(order), media_type="image/png")
            except (ShapeError, ArgumentError) as error:
                raise HTTPException(UNPROCESSABLE, str(error)) from error
            except PurlinError as error:  # a rank failed; the next request gets new carriers
                raise HTTPException(FAILED, f"{type(error).__name__}: {error}") from error
            except ValueError as error:  # what the pipeline refuses: a size, a combination of options
                raise HTTPException(BAD_REQUEST, str(error)) from error

    return app


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description="A small picture server.")
    parser.add_argument("--model", default="digits", help="a name, folder or hub id that pipelines.load knows")
    parser.add_argument("--devices", type=int, default=2, help="ranks: GPUs of this machine, or threads on the CPU")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    uvicorn.run(create(args.model, args.devices, device=device), host="127.0.0.1", port=args.port)


if __name__ == "__main__":
    main()
