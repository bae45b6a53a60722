"""OpenAI's Responses API: the server stores the conversation, and the next turn names the last one.

pip install openai
"""

import os

from openai import OpenAI

URL = os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000")

with OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("MILLSTREAM_API_KEY", "none")) as client:
    model = client.models.list().data[0].id
    first = client.responses.create(model=model, input="What is the capital of France?", temperature=0)
    print(first.output_text)
    with client.responses.stream(
        model=model, input="And of Italy?", previous_response_id=first.id, temperature=0, max_output_tokens=60
    ) as stream:
        for event in stream:
            if event.type == "response.output_text.delta":
                print(event.delta, end="", flush=True)
    print()
