"""A streamed chat with Anthropic's client.

pip install anthropic
"""

import os

from anthropic import Anthropic

URL = os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000")

with Anthropic(base_url=URL, api_key=os.environ.get("MILLSTREAM_API_KEY", "none")) as client:
    model = client.models.list().data[0].id
    question = {"role": "user", "content": "What is the capital of France?"}
    with client.messages.stream(
        model=model, max_tokens=100, messages=[question], extra_body={"temperature": 0}
    ) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        usage = stream.get_final_message().usage
    print(f"\n{usage.input_tokens} tokens in, {usage.output_tokens} out")
