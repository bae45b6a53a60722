"""A streamed chat with Ollama's client.

pip install ollama
"""

import os

from ollama import Client

client = Client(host=os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000"))
model = client.list().models[0].model
question = {"role": "user", "content": "What is the capital of France?"}
for part in client.chat(model, messages=[question], options={"temperature": 0}, stream=True):
    print(part.message.content, end="", flush=True)
print()
