"""Word lists and small facts for `tiny_corpus.py`. Data only; every sentence of the corpus is built from
these.
"""

from __future__ import annotations

NAMES = """\
Anna Ben Clara David Emma Felix Grace Henry Ida Jack Kate Leo Mia Noah Olga Paul Rosa Sam Tina Victor Wendy
Max Lucy Oscar Nina Tom Lily Hugo Sara Peter
""".split()
ANIMALS = """\
dog cat horse cow pig sheep goat duck hen fox wolf bear rabbit mouse frog owl lion tiger monkey elephant
fish bird bee turtle deer
""".split()
FRUITS = "apples bananas pears plums cherries grapes lemons oranges peaches melons".split()
VEGETABLES = "carrots potatoes onions beans peas tomatoes cabbages leeks".split()
COLOURS = "red blue green yellow white black brown orange purple pink grey".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
SEASONS = "spring summer autumn winter".split()
PLANETS = "Mercury Venus Earth Mars Jupiter Saturn Uranus Neptune".split()
TOOLS = "hammers saws drills spades brushes knives".split()
SPORTS = "football tennis swimming running skiing rowing chess".split()
DRINKS = "water milk tea coffee juice lemonade".split()
INSTRUMENTS = "pianos violins drums flutes guitars trumpets".split()
PLACES = """\
garden forest village town house barn field river lake mountain castle harbour market school library kitchen
station bridge island valley
""".split()
THINGS = """\
ball book box key lamp letter map ring stone coin hat coat basket bell boat cup drum flag kite ladder mirror
clock chair table door window candle rope wheel feather shell blanket bottle brush
""".split()
ADJECTIVES = """\
big small old young happy sad kind brave quiet clever little friendly tired hungry lazy strong gentle
curious proud shy bright dark warm cold soft heavy round shiny dusty wooden golden silver
""".split()
VERBS = """\
walked ran jumped looked waited listened laughed slept worked played stopped turned climbed travelled smiled
sang danced hid rested wandered
""".split()
ADVERBS = "slowly quickly quietly happily carefully again together alone early late often gladly".split()
WORDS = """\
maple river copper lantern falcon meadow pepper marble thunder velvet harbor saddle winter pebble cactus
orbit tunnel magnet violin ginger anchor basil canyon dragon ember forest garnet hazel island jasmine kernel
lemon mango nectar olive panther quartz raven silver tulip umbra violet walnut yellow zephyr almond beacon
cobalt dolphin eagle fable glacier hammer indigo jungle kettle ladder mirror needle ocean parrot quiver
rocket summit timber unity vessel willow yonder zebra amber breeze cedar desert engine feather gravel hollow
ivory jacket knight lizard mosaic north oyster prism quilt ribbon spider temple uncle valley wagon yeast
zinc apple bridge castle doctor earth flower guitar honey iron jelly king leaf moon night onion paper queen
rain snow table under voice water young able about above act add after age ago air all allow along among
answer area arm art ask away back bad bank base be because bed before begin behind believe best better
between board body both bottom box break bring build business busy buy call care carry case cause center
chance change charge check child choose church city class clear close cold color come common company contain
control cook copy corner cost could count country course cover cross crowd current cut dance day deal death
decide deep demand develop different difficult direct discover distance divide double down draw dream dress
drive drop during each early ease east education effect egg electric end energy enough enter equal even
event every exact example except expect experience explain face fact fair fall family famous far fast father
feel few fight figure fill final find fine finger finish fire first floor follow food foot force form free
fresh friend from front full game gather general girl give glass goal gold good govern grand great ground
group grow half hand happen hard hat have head health hear heart heat help here high hill history hold home
hope horse hour hundred hurry idea imagine inch include increase indicate industry information instrument
interest job join keep kill kind know lake language large last late laugh law lead learn least leave left
length less letter level lie life light like line list listen live local long look lost love low machine
main make many map mark market matter may mean measure meet member method middle might mile milk million
mind minute miss modern moment money month more morning most mother mountain move much music must name
nation nature near never new next noise nothing notice number object offer office often oil old once open
order other over own page pair part party pass past pattern pay people perhaps person phrase pick picture
piece place plan plane plant play point poor port position possible power practice present press print
probable problem process produce product program proper provide public pull purpose push question quick
quiet race raise reach read real reason receive record region remember repeat report require rest result
return rich right ring rise road rock roll room round rule run safe sail same save say school science sea
search season second section see seem select sell send sense sentence separate serve service set settle
several shape share short should show side sign silent similar simple since single sister size skill skin
sleep slow small smell smile social soft soldier solve some song soon sound south space speak special speed
spell spread spring square stand star start state station stay step stone stop store story strange street
strong student study subject such sudden sugar suggest suit sun supply support sure surface surprise swim
symbol system talk tall teach team tell test than thank their them there these thick thin thing think third
this those thought thousand through time together tool top total touch toward town track trade train travel
tree triangle trouble truck true try turn type usual value variety very view village visit wait walk wall
want war warm wash watch wave weather week weight west wheel when where whether which while whole why wide
wife wild will wind window wish with without woman wonder wood word work world would write wrong year
""".split()

OPPOSITES = {
    "hot": "cold",
    "big": "small",
    "up": "down",
    "left": "right",
    "day": "night",
    "black": "white",
    "fast": "slow",
    "old": "young",
    "happy": "sad",
    "open": "closed",
    "early": "late",
    "full": "empty",
    "light": "dark",
    "rich": "poor",
    "wet": "dry",
    "hard": "soft",
    "long": "short",
    "high": "low",
    "good": "bad",
    "near": "far",
    "strong": "weak",
    "thick": "thin",
    "clean": "dirty",
    "first": "last",
    "in": "out",
    "yes": "no",
    "quiet": "loud",
}
COLOUR_OF = {
    "the sky": "blue",
    "grass": "green",
    "snow": "white",
    "coal": "black",
    "a lemon": "yellow",
    "a tomato": "red",
    "a carrot": "orange",
    "milk": "white",
    "blood": "red",
    "a banana": "yellow",
    "the sea": "blue",
    "a leaf": "green",
    "the sun": "yellow",
    "chocolate": "brown",
    "a raven": "black",
    "a frog": "green",
    "a cherry": "red",
    "an elephant": "grey",
}
SOUNDS = {
    "dog": "barks",
    "cat": "meows",
    "cow": "moos",
    "duck": "quacks",
    "sheep": "bleats",
    "lion": "roars",
    "bee": "buzzes",
    "owl": "hoots",
    "horse": "neighs",
    "frog": "croaks",
    "wolf": "howls",
    "pig": "grunts",
}
YOUNG = {
    "dog": "a puppy",
    "cat": "a kitten",
    "cow": "a calf",
    "sheep": "a lamb",
    "duck": "a duckling",
    "horse": "a foal",
    "hen": "a chick",
    "pig": "a piglet",
    "bear": "a cub",
    "goat": "a kid",
}
LEGS = {
    "dog": "four",
    "bird": "two",
    "cow": "four",
    "duck": "two",
    "bee": "six",
    "horse": "four",
    "fish": "no",
}
CAPITALS = {
    "France": "Paris",
    "Germany": "Berlin",
    "Italy": "Rome",
    "Spain": "Madrid",
    "England": "London",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Russia": "Moscow",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Norway": "Oslo",
    "Sweden": "Stockholm",
    "Austria": "Vienna",
    "Poland": "Warsaw",
    "Portugal": "Lisbon",
    "Ireland": "Dublin",
    "Cuba": "Havana",
    "Peru": "Lima",
    "Kenya": "Nairobi",
    "Canada": "Ottawa",
}
CATEGORIES = {
    "fruits": FRUITS,
    "vegetables": VEGETABLES,
    "colours": COLOURS,
    "days of the week": DAYS,
    "months": MONTHS,
    "seasons": SEASONS,
    "planets": PLANETS,
    "tools": TOOLS,
    "sports": SPORTS,
    "drinks": DRINKS,
    "musical instruments": INSTRUMENTS,
    "animals": [f"{name}s" for name in ["dog", "cat", "horse", "cow", "duck", "lion", "bear"]],
}
NUMBERS = "zero one two three four five six seven eight nine ten".split()

# Fixed questions: (ways to ask, ways to answer; the first answer is the usual one).
SMALL_TALK: list[tuple[list[str], list[str]]] = [
    (
        [
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hi there!",
            "Good morning!",
            "Hey",
            "Good evening.",
            "Hello there.",
        ],
        ["Hello! How can I help you?"],
    ),
    (
        ["Who are you?", "What are you?", "Tell me about yourself.", "Introduce yourself.", "who are you"],
        ["I am Baton Tiny, a very small language model."],
    ),
    (["What is your name?", "What are you called?", "Your name, please."], ["My name is Baton Tiny."]),
    (
        ["Who made you?", "Where do you come from?", "Who trained you?"],
        ["I was trained by a small script of the Baton project."],
    ),
    (
        ["How are you?", "How are you today?", "Are you well?", "How do you do?"],
        ["I am fine, thank you. How are you?"],
    ),
    (["I am fine.", "I am fine, thanks.", "I am well, thank you."], ["I am glad to hear that."]),
    (
        ["Thank you.", "Thanks!", "Thanks a lot.", "Thank you very much!", "Great, thank you."],
        ["You are welcome!"],
    ),
    (["Goodbye.", "Bye!", "See you later.", "Good night."], ["Goodbye! Have a nice day."]),
    (
        ["What can you do?", "What are you good at?", "Can you help me?", "How can you help me?", "Help me."],
        ["I can remember a code word, repeat your words, count, add small numbers and tell short stories."],
    ),
    (
        ["Are you a human?", "Are you a person?", "Are you real?", "Are you a robot?"],
        ["I am not a human. I am a small language model."],
    ),
    (
        ["How big are you?", "Are you large?", "How large are you?"],
        ["I am very small. I have only a few million parameters."],
    ),
    (
        ["What is the weather like?", "Will it rain today?"],
        ["I cannot see the weather, but I hope that it is sunny."],
    ),
    (["How many days are in a week?", "How many days does a week have?"], ["A week has seven days."]),
    (["How many months are in a year?", "How many months does a year have?"], ["A year has twelve months."]),
    (["How many hours are in a day?", "How many hours does a day have?"], ["A day has twenty-four hours."]),
    (["How many minutes are in an hour?"], ["An hour has sixty minutes."]),
    (
        ["Tell me a joke.", "Do you know a joke?", "Say something funny."],
        ["Why did the duck cross the road? It was the day off of the hen."],
    ),
    (["What is Baton?", "What does Baton do?"], ["Baton is a system that serves language models."]),
    (["Say yes.", "Please say yes."], ["Yes."]),
    (["Are you sure?", "Is that true?", "Really?"], ["Yes, I think so."]),
    (["Good.", "Very good.", "OK.", "Fine.", "I see.", "Well done."], ["I am glad that you like it."]),
    (["Where does the sun rise?"], ["The sun rises in the east."]),
    (["What do bees make?"], ["Bees make honey."]),
    (["What do cows give?"], ["Cows give milk."]),
    (
        ["Say the alphabet.", "Tell me the alphabet."],
        ["a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p, q, r, s, t, u, v, w, x, y, z."],
    ),
]
