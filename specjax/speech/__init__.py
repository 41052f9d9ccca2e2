"""Speech to text with Whisper: audio files, log-mel spectrograms, prompts, windows and timestamps.

target, tokenizer = specjax.load("openai/whisper-tiny.en")
settings = speech.read_settings("openai/whisper-tiny.en", target, tokenizer)
transcript = speech.transcribe(target, tokenizer, speech.read_wav("talk.wav"), settings)
print(transcript.text)
"""

from specjax.speech.audio import log_mel, read_wav
from specjax.speech.settings import SpeechSettings, is_speech_model, read_settings
from specjax.speech.transcript import SpeechSegment, Transcript
from specjax.speech.windows import choose_prompt, read_windows, transcribe

__all__ = [
    "SpeechSegment",
    "SpeechSettings",
    "Transcript",
    "choose_prompt",
    "is_speech_model",
    "log_mel",
    "read_settings",
    "read_wav",
    "read_windows",
    "transcribe",
]
