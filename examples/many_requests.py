"""Many questions at once: the server answers them in one batch, several times faster than one after another.

pip install openai
"""

import asyncio
import os
import time

from openai import AsyncOpenAI

URL = os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000")
COUNTRIES = ["France", "Italy", "Spain", "Norway", "Japan", "Egypt", "Peru", "Kenya"]


async def ask(client: AsyncOpenAI, country: str) -> str:
    question = {"role": "user", "content": f"What is the capital of {country}?"}
    reply = await client.chat.completions.create(model="", messages=[question], temperature=0, max_tokens=24)
    return reply.choices[0].message.content or ""


async def main() -> None:
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("MILLSTREAM_API_KEY", "none")) as client:
        started = time.monotonic()
        answers = await asyncio.gather(*(ask(client, country) for country in COUNTRIES))
    for country, answer in zip(COUNTRIES, answers, strict=True):
        print(f"{country}: {answer}")
    print(f"{len(answers)} answers in {time.monotonic() - started:.1f} s")


asyncio.run(main())
