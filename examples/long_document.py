"""Several questions about one document. It is read once: the prefix cache holds it for the later questions.

pip install openai
"""

import os
import sys
from pathlib import Path

from openai import OpenAI

URL = os.environ.get("MILLSTREAM_URL", "http://127.0.0.1:8000")
DOCUMENT = Path(sys.argv[1] if len(sys.argv) > 1 else __file__).read_text()
QUESTIONS = ["What is this text about?", "Which words occur most often?", "Summarise it in one sentence."]

with OpenAI(base_url=f"{URL}/v1", api_key=os.environ.get("MILLSTREAM_API_KEY", "none")) as client:
    for question in QUESTIONS:
        reply = client.chat.completions.create(
            model="",
            # The document comes first, and what changes comes last: only a shared beginning can be reused.
            messages=[{"role": "system", "content": DOCUMENT}, {"role": "user", "content": question}],
            temperature=0,
            max_tokens=24,
        )
        usage = reply.usage
        cached = usage.prompt_tokens_details.cached_tokens
        print(f"{question} ({usage.prompt_tokens} tokens in, {cached} of them cached)")
        print(f"  {reply.choices[0].message.content}")
