"""A question about a picture.

Needs a vision model, such as mlx-community/Qwen2.5-VL-3B-Instruct-4bit, and `pip install --no-deps mlx-vlm pillow`
where the server runs.

pip install openai
python images.py picture.png "What is in the picture?"
"""

import base64
import mimetypes
import os
import sys
from pathlib import Path

from openai import OpenAI

URL = os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000")

file = Path(sys.argv[1])
question = sys.argv[2] if len(sys.argv) > 2 else "What is in the picture?"
kind = mimetypes.guess_type(file)[0] or "image/png"
picture = f"data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"
content = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": picture}}]

with OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("MILLSTREAM_API_KEY", "none")) as client:
    reply = client.chat.completions.create(
        model="", messages=[{"role": "user", "content": content}], max_tokens=100, temperature=0
    )
    print(reply.choices[0].message.content)
