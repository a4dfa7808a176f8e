"""A FastAPI app that embeds a group: POST /generate streams token ids as server-sent events.

    SMG_WORKER_URL=ipc:///run/user/1000/smg/engine-31000 uvicorn examples.fastapi_app:app

Needs `pip install smg-fastpath fastapi uvicorn`. Start the engine ranks, or `python -m smg mock`, beside it.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from pydantic import BaseModel

import smg


class Generate(BaseModel):
    prompt_token_ids: list[int]
    max_tokens: int = 64


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with smg.EngineGroup(
        os.environ["SMG_WORKER_URL"],
        backend="tokenspeed",
        ranks=int(os.environ.get("SMG_RANKS", "1")),
        handshake_address=os.environ.get("SMG_HANDSHAKE_ADDRESS"),
    ) as group:
        app.state.group = group
        yield


app = FastAPI(lifespan=lifespan)


@app.post("/generate")
async def generate(body: Generate) -> StreamingResponse:
    try:
        stream = app.state.group.submit(body.prompt_token_ids, smg.SamplingParams(max_tokens=body.max_tokens))
    except smg.InvalidRequest as error:
        raise HTTPException(400, str(error)) from None
    except (smg.NoRank, smg.Overloaded) as error:
        raise HTTPException(503, str(error)) from None

    async def events() -> AsyncIterator[str]:
        try:
            async for out in stream:  # a client that leaves ends this, and that aborts the request
                yield f"data: {json.dumps({'token_ids': out.token_ids, 'finish_reason': out.finish_reason})}\n\n"
        except smg.StreamError as error:
            yield f"event: error\ndata: {json.dumps(str(error))}\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


@app.get("/in_flight")
async def in_flight() -> list[int]:
    return app.state.group.in_flight.tolist()
