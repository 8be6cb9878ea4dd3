"""Wishes for the functions that examples have: weather, time, sums, searches, messages, prices, lights."""

from __future__ import annotations

from random import Random

import tiny_words as w
from tiny_talk import story_sentence
from tiny_wishes import CITIES, Function, Parameter, Value, Wish, text_value, value


def known_wish(rng: Random) -> Wish:
    """A wish for one of the functions that examples have: weather, time, sums, searches, messages, prices."""
    return rng.choice((weather, weather, weather, clock, sums, search, message, price, light))(rng)


def optional(rng: Random, *more: Parameter) -> tuple[Parameter, ...]:
    """Some of these."""
    return tuple(one for one in more if rng.random() < 0.2)


def weather(rng: Random) -> Wish:
    """The weather of a city."""
    place = rng.choice(["city", "city", "city", "city", "location", "place"])
    units = Parameter("unit", "enum", ("celsius", "fahrenheit"), required=False)
    days = Parameter("days", "integer", required=False)
    function = Function(
        rng.choice(["weather", "weather", "get_weather", "get_weather", "current_weather", "getWeather"]),
        rng.choice(
            [
                f"Tells the weather of a {place}.",
                f"Tells the weather in a {place}.",
                f"Get the weather of a {place}.",
                f"Gets the current weather in a {place}.",
                f"Get the current weather in a given {place}.",
                f"Get current weather for a {place}",
                f"The weather in a {place}.",
                "Tells the weather.",
                "Get the weather",
                "",
            ]
        ),
        (Parameter(place, "string"), *optional(rng, units, days)),
    )
    city = Value(*[rng.choice(CITIES)] * 2) if rng.random() < 0.8 else text_value(rng)
    given, more = {place: city}, ""
    for one in function.parameters[1:]:
        if rng.random() < 0.5:
            given[one.name] = (
                value(rng, one) if one.kind == "enum" else Value(n := rng.randint(1, 14), str(n))
            )
            said = given[one.name].said
            more += f" in {said}" if one.kind == "enum" else f" for {said} days"
    text = f"the weather {rng.choice(['in', 'in', 'in', 'of', 'for', 'at'])} {city.said}"
    asks = [
        "How is {}{}?",
        "How is {}{}?",
        "What is {}{}?",
        "What is {} like{}?",
        "What's {}{}?",
        "Tell me {}{}.",
    ]
    ask = rng.choice([*asks, "Please tell me {}{}.", "How is {} today{}?", "how is {}{}", "Get {}{}."])
    return Wish(ask.format(text, more), "weather", function, given, f"T{text[1:]} is")


def clock(rng: Random) -> Wish:
    """The time in a city."""
    place = rng.choice(["city", "city", "zone", "place", "timezone"])
    function = Function(
        rng.choice(["time", "get_time", "clock", "current_time"]),
        rng.choice(
            [f"Tells the time in a {place}.", f"Get the current time of a {place}.", "Tells the time."]
        ),
        (Parameter(place, "string"),),
    )
    city = Value(*[rng.choice(CITIES)] * 2)
    text = f"time in {city.said}"
    ask = rng.choice([f"What is the {text}?", f"Tell me the {text}.", f"What time is it in {city.said}?"])
    return Wish(ask, "time", function, {place: city}, f"The {text} is")


def sums(rng: Random) -> Wish:
    """A function that computes with two numbers."""
    name, about, forms = rng.choice(
        [
            ("add", "Adds two numbers.", ["Add {} and {}.", "What is {} plus {}?", "What is {} + {}?"]),
            ("multiply", "Multiplies two numbers.", ["Multiply {} and {}.", "What is {} times {}?"]),
            ("subtract", "Subtracts two numbers.", ["What is {} minus {}?", "What is {} - {}?"]),
            ("divide", "Divides two numbers.", ["Divide {} by {}.", "What is {} divided by {}?"]),
        ]
    )
    first, second = rng.choice([("a", "b"), ("a", "b"), ("x", "y"), ("first", "second")])
    kind = rng.choice(["integer", "integer", "number"])
    listed = (Parameter(first, kind), Parameter(second, kind))
    top = 10 ** rng.randint(1, 5)
    given = {one: Value(number := rng.randint(0, top), str(number)) for one in (first, second)}
    text = rng.choice(forms).format(given[first].said, given[second].said)
    return Wish(text, "numbers", Function(name, rng.choice([about, about, f"{about[:-1]}"]), listed), given)


def search(rng: Random) -> Wish:
    """A search for words."""
    function = Function(
        rng.choice(["search", "web_search", "search_web", "find", "lookup"]),
        rng.choice(["Searches the web.", "Search the web for a query.", "Looks up words.", "Finds pages."]),
        (Parameter("query", "string"), *optional(rng, Parameter("limit", "integer", required=False))),
    )
    words = " ".join(rng.sample(w.WORDS, rng.randint(1, 4)))
    query = Value(words, words) if rng.random() < 0.7 else Value(words, f'"{words}"', quoted=True)
    text = rng.choice(["Search for {}.", "Search the web for {}.", "Look up {}.", "Find pages about {}."])
    return Wish(text.format(query.said), "search", function, {"query": query})


def message(rng: Random) -> Wish:
    """A message to somebody."""
    what = rng.choice(["mail", "message", "letter", "note"])
    to, body = rng.choice([("to", "text"), ("to", "body"), ("name", "text"), ("person", "message")])
    function = Function(
        rng.choice([f"send_{what}", what, "send"]),
        rng.choice([f"Sends a {what}.", f"Sends a {what} to a person.", f"Send a {what}"]),
        (Parameter(to, "string"), Parameter(body, "string")),
    )
    words = story_sentence(rng).replace('"', "") if rng.random() < 0.4 else " ".join(rng.sample(w.WORDS, 3))
    person = Value(*[rng.choice(w.NAMES)] * 2) if rng.random() < 0.8 else text_value(rng)
    said = Value(words, f'"{words}"', quoted=True)
    text = rng.choice(
        [
            f"Send a {what} to {person.said}: {said.said}",
            f"Send {said.said} to {person.said} as a {what}.",
            f"Send a {what} to {person.said} with the text {said.said}.",
        ]
    )
    return Wish(text, what, function, {to: person, body: said})


def price(rng: Random) -> Wish:
    """The price of something."""
    key = rng.choice(["symbol", "item", "name", "product"])
    function = Function(
        rng.choice(["price", "get_price", "stock_price"]),
        rng.choice([f"Tells the price of a {key}.", "Gets a price."]),
        (Parameter(key, "string"),),
    )
    thing = text_value(rng)
    text = f"the price of {thing.said}"
    ask = rng.choice([f"What is {text}?", f"Tell me {text}.", f"Get {text}."])
    return Wish(ask, "price", function, {key: thing}, f"T{text[1:]} is")


def light(rng: Random) -> Wish:
    """A light that is turned on or off."""
    function = Function(
        rng.choice(["light", "set_light", "turn_light"]),
        rng.choice(["Turns a light on or off.", "Sets the light of a room."]),
        (Parameter("room", "string"), Parameter("on", "boolean")),
    )
    room, flag = rng.choice(w.PLACES), rng.random() < 0.5
    word = "on" if flag else "off"
    text = rng.choice([f"Turn {word} the light in the {room}.", f"Turn the light in the {room} {word}."])
    return Wish(text, "light", function, {"room": Value(room, room), "on": Value(flag, word)})
