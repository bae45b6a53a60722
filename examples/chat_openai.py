"""A streamed chat with OpenAI's client.

pip install openai
"""

import os

from openai import OpenAI

URL = os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000")

with OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("MILLSTREAM_API_KEY", "none")) as client:
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()
