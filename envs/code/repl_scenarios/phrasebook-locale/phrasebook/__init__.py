from phrasebook.book import Phrasebook

__all__ = ["Phrasebook"]
