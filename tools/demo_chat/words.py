"""What belongs to the categories of the demo's task: names that a person would accept, singular, in lower case."""

from __future__ import annotations

_WORDS = {
    "animals": """ant alligator antelope armadillo baboon badger bat bear beaver bee beetle bird bison boar
        buffalo butterfly camel cat caterpillar cheetah chicken chimpanzee cobra cow coyote crab crane cricket
        crocodile crow deer dog dolphin donkey dove duck eagle elephant elk falcon ferret finch fish flamingo fly
        fox frog gazelle giraffe goat goose gorilla grasshopper hamster hare hawk hedgehog hen heron hippopotamus
        horse hyena iguana jackal jaguar jellyfish kangaroo koala lamb leopard lion lizard llama lobster lynx
        meerkat mole monkey moose mosquito moth mouse mule octopus opossum ostrich otter owl ox panda panther
        parrot peacock pelican penguin pig pigeon polar_bear pony porcupine possum puma rabbit raccoon ram rat
        raven reindeer rhinoceros rooster salmon scorpion sea_lion seal shark sheep skunk sloth snail snake
        sparrow spider squid squirrel stork swan tiger toad trout turkey turtle tortoise walrus wasp weasel whale
        wolf wolverine wombat woodpecker worm yak zebra""",
    "fruits": """apple apricot avocado banana blackberry blackcurrant blueberry cantaloupe cherry clementine
        coconut cranberry currant date dragon_fruit durian elderberry fig gooseberry grape grapefruit guava
        honeydew jackfruit kiwi kumquat lemon lime lychee mandarin mango melon mulberry nectarine olive orange
        papaya passion_fruit peach pear persimmon pineapple plum pomegranate quince raspberry starfruit strawberry
        tangerine tomato watermelon""",
    "vegetables": """artichoke asparagus aubergine bean beet beetroot bell_pepper broccoli brussels_sprout cabbage
        carrot cauliflower celery chard chickpea collard_green corn courgette cucumber eggplant endive fennel
        garlic ginger green_bean kale kohlrabi leek lentil lettuce mushroom mustard_green okra onion parsley
        parsnip pea pepper potato pumpkin radish rutabaga scallion shallot spinach squash sweet_potato tomato
        turnip watercress yam zucchini""",
    "colors": """amber aqua azure beige black blue bronze brown burgundy charcoal coral cream crimson cyan emerald
        fuchsia gold gray green grey indigo ivory jade khaki lavender lemon lilac lime magenta maroon mauve
        mustard navy ochre olive orange peach pink plum purple red rose ruby rust salmon sapphire scarlet silver
        tan teal turquoise violet white yellow""",
    "countries": """afghanistan albania algeria angola argentina armenia australia austria bahrain bangladesh
        belarus belgium belize bolivia botswana brazil bulgaria cambodia cameroon canada chad chile china colombia
        congo costa_rica croatia cuba cyprus czech_republic denmark ecuador egypt england estonia ethiopia fiji
        finland france gabon georgia germany ghana greece guatemala haiti honduras hungary iceland india indonesia
        iran iraq ireland israel italy jamaica japan jordan kazakhstan kenya kuwait laos latvia lebanon libya
        lithuania luxembourg madagascar malaysia mali malta mexico moldova monaco mongolia montenegro morocco
        mozambique namibia nepal netherlands new_zealand nicaragua niger nigeria north_korea norway oman pakistan
        panama paraguay peru philippines poland portugal qatar romania russia rwanda saudi_arabia scotland senegal
        serbia singapore slovakia slovenia somalia south_africa south_korea spain sri_lanka sudan sweden
        switzerland syria taiwan tanzania thailand togo tunisia turkey uganda ukraine united_kingdom united_states
        uruguay venezuela vietnam wales yemen zambia zimbabwe""",
    "musical instruments": """accordion bagpipe banjo bass bassoon bell bugle castanet cello clarinet cornet
        cymbal didgeridoo drum electric_guitar euphonium fiddle flute french_horn glockenspiel gong guitar
        harmonica harp harpsichord horn keyboard lute lyre mandolin maraca marimba oboe organ piano piccolo
        recorder saxophone sitar snare_drum steel_drum synthesizer tambourine triangle trombone trumpet tuba
        ukulele viola violin xylophone zither""",
    "sports": """archery athletics badminton baseball basketball bobsled bowling boxing canoeing climbing cricket
        curling cycling diving dodgeball fencing figure_skating fishing football golf gymnastics handball hiking
        hockey ice_hockey ice_skating judo karate kayaking lacrosse marathon netball polo racing rafting rowing
        rugby running sailing shooting skateboarding skating skiing snowboarding soccer softball squash surfing
        swimming table_tennis taekwondo tennis track triathlon volleyball walking water_polo weightlifting
        wrestling yoga""",
    "jobs": """accountant actor actress architect artist astronaut author baker banker barber bartender biologist
        bricklayer builder bus_driver butcher carpenter cashier chef chemist cleaner clerk coach cook dancer
        dentist designer detective director doctor driver economist editor electrician engineer farmer fireman
        firefighter fisherman florist gardener hairdresser historian janitor jeweler journalist judge lawyer
        lecturer librarian lifeguard manager mechanic midwife miner model musician nanny nurse painter paramedic
        pharmacist photographer physicist pilot plumber poet police_officer policeman politician postman professor
        programmer psychologist receptionist reporter sailor salesman scientist secretary shoemaker singer
        social_worker software_engineer soldier surgeon tailor taxi_driver teacher technician therapist translator
        truck_driver tutor veterinarian waiter waitress welder writer zoologist""",
    "tools": """anvil auger awl axe ax chainsaw chisel clamp crowbar cutter drill file glue_gun hacksaw hammer
        hand_saw handsaw hatchet hoe jack jigsaw ladder lathe level mallet nail_gun pickaxe plane pliers plunger
        pruner rake ruler sander sandpaper saw scissors screwdriver shears shovel sickle spade spanner square
        stapler tape_measure trowel tweezers utility_knife vise wheelbarrow wire_cutter wrench knife""",
    "clothes": """apron belt beret blazer blouse boot bra cap cape cardigan cloak coat dress glove gown hat hoodie
        jacket jeans jersey jumper kilt legging leggings mitten necktie nightgown overall overalls overcoat
        pajamas pants poncho pullover pyjamas raincoat robe sandal scarf shawl shirt shoe shorts skirt slipper
        sneaker sock stocking suit sunglasses sweater sweatshirt swimsuit t-shirt tank_top tie tights trousers
        tunic tuxedo underwear uniform veil vest waistcoat""",
    "flowers": """amaryllis anemone aster azalea begonia bluebell buttercup camellia carnation chrysanthemum
        clematis cornflower crocus daffodil dahlia daisy delphinium forget-me-not foxglove freesia fuchsia
        gardenia geranium gladiolus hibiscus hollyhock honeysuckle hyacinth hydrangea iris jasmine lavender lilac
        lily lotus magnolia marigold morning_glory narcissus orchid pansy peony petunia poinsettia poppy primrose
        rhododendron rose snapdragon snowdrop sunflower sweet_pea tulip violet wisteria zinnia""",
    "vehicles": """aeroplane airplane ambulance balloon barge bicycle bike boat bulldozer bus cab canoe car
        carriage cart coach convertible ferry fire_engine fire_truck forklift gondola helicopter hovercraft jeep
        jet kayak limousine lorry minibus minivan moped motorbike motorcycle motorboat plane pickup_truck
        police_car raft rickshaw rocket rowboat sailboat scooter sedan ship skateboard sled snowmobile spaceship
        sports_car submarine subway suv tank taxi tractor trailer train tram tricycle trolley truck van wagon
        yacht""",
    "drinks": """ale apple_juice beer champagne chocolate cider cocktail cocoa coffee cola cranberry_juice eggnog
        espresso gin ginger_ale grape_juice green_tea hot_chocolate iced_tea juice kombucha latte lemonade liquor
        mead milk milkshake mineral_water orange_juice punch root_beer rum sake sherry smoothie soda tea tequila
        tomato_juice vodka water whiskey whisky wine""",
    "pieces of furniture": """armchair bar_stool bed bench bookcase bookshelf buffet bunk_bed cabinet chair chest
        coffee_table couch cradle crib cupboard desk dining_table drawer dresser footstool futon hammock headboard
        lamp loveseat mattress mirror nightstand ottoman recliner rocking_chair rug shelf sideboard sofa stool
        table wardrobe""",
    "cities": """amsterdam athens atlanta auckland baghdad bangkok barcelona beijing berlin boston brussels
        budapest buenos_aires cairo cape_town chicago copenhagen dallas delhi denver detroit dubai dublin
        edinburgh florence frankfurt geneva hamburg hanoi helsinki hong_kong houston istanbul jakarta jerusalem
        johannesburg karachi kiev kolkata kyoto lagos las_vegas lima lisbon liverpool london los_angeles lyon
        madrid manchester manila melbourne mexico_city miami milan montreal moscow mumbai munich nairobi naples
        new_delhi new_orleans new_york new_york_city osaka oslo ottawa oxford paris philadelphia phoenix prague
        rio_de_janeiro rome san_diego san_francisco santiago sao_paulo seattle seoul shanghai singapore stockholm
        sydney taipei tehran tokyo toronto turin vancouver venice vienna warsaw washington zurich""",
    "languages": """afrikaans albanian arabic armenian bengali bulgarian burmese cantonese catalan chinese
        croatian czech danish dutch english estonian finnish french georgian german greek gujarati hausa hebrew
        hindi hungarian icelandic igbo indonesian irish italian japanese khmer korean kurdish lao latin latvian
        lithuanian malay mandarin marathi mongolian nepali norwegian pashto persian polish portuguese punjabi
        romanian russian sanskrit serbian slovak slovenian somali spanish swahili swedish tagalog tamil telugu
        thai tibetan turkish ukrainian urdu vietnamese welsh yoruba zulu""",
}

CATEGORIES: dict[str, tuple[str, ...]] = {
    name: tuple(word.replace("_", " ") for word in words.split()) for name, words in _WORDS.items()
}


def belongs(item: str, category: str) -> bool:
    """Whether an item in any case is of the category."""
    return name_of(item, category) is not None


def name_of(item: str, category: str) -> str | None:
    """The word of the category that an item in any case is: itself, or what it is a plural or another name of; None
    where there is none."""
    word = item.lower()
    forms = [word, word.removesuffix("s"), word.removesuffix("es")]
    forms += [word[:-3] + "y"] if word.endswith("ies") else []
    forms += [_SAME[word]] if word in _SAME else []
    return next((_SAME.get(form, form) for form in forms if form in _KNOWN[category]), None)


_SAME = {
    "bookshelves": "bookshelf", "firemen": "fireman", "fishermen": "fisherman", "geese": "goose", "knives": "knife",
    "mice": "mouse", "octopi": "octopus", "oxen": "ox", "policemen": "policeman", "postmen": "postman",
    "salesmen": "salesman", "scarves": "scarf", "shelves": "shelf", "wolves": "wolf",
    "aeroplane": "airplane", "ax": "axe", "grey": "gray", "pyjamas": "pajamas", "whisky": "whiskey",
    "uk": "united kingdom", "us": "united states", "usa": "united states", "united states of america": "united states",
}  # fmt: skip
"""Irregular plurals, other spellings and abbreviations."""


_KNOWN = {name: frozenset(words) for name, words in CATEGORIES.items()}

_FAMILIAR = {
    "animals": "bear cat cow dog elephant fox horse lion monkey rabbit sheep tiger wolf zebra",
    "fruits": "apple apricot banana cherry fig grape kiwi lemon mango orange peach pear plum strawberry",
    "vegetables": "asparagus bean broccoli cabbage carrot celery corn lettuce onion pea pepper potato spinach tomato",
    "colors": "black blue brown gold gray green orange pink purple red silver violet white yellow",
    "countries": "australia brazil canada china egypt france germany india italy japan mexico russia spain sweden",
    "musical instruments": """cello clarinet drum flute guitar harp oboe organ piano saxophone trombone trumpet
        tuba violin""",
    "sports": """badminton baseball basketball boxing cricket football golf hockey rugby soccer surfing swimming
        tennis volleyball""",
    "jobs": "actor artist baker chef doctor engineer farmer judge lawyer nurse pilot singer teacher writer",
    "tools": "axe chisel drill file hammer knife ladder pliers rake ruler saw screwdriver shovel wrench",
    "clothes": "belt boot coat dress glove hat jacket jeans scarf shirt shoe skirt sock sweater",
    "flowers": "carnation daffodil daisy iris jasmine lavender lily lotus orchid poppy rose sunflower tulip violet",
    "vehicles": "airplane bicycle boat bus car helicopter motorcycle ship subway taxi tractor train truck van",
    "drinks": "beer cider cocoa coffee cola juice lemonade milk punch soda tea vodka water wine",
    "pieces of furniture": """armchair bed bench bookcase cabinet chair couch cupboard desk lamp sofa stool table
        wardrobe""",
    "cities": "amsterdam berlin boston cairo chicago dublin london madrid moscow paris rome sydney tokyo vienna",
    "languages": """arabic chinese dutch english french german greek hindi italian japanese korean russian spanish
        turkish""",
}
FAMILIAR = {name: tuple(words.split()) for name, words in _FAMILIAR.items()}
"""Of each category those that right answers to learn from are made of."""
