"""Cue phrases of follow-ups in English, German, Spanish, French, Portuguese, Russian, Chinese and Japanese.

Takes: nothing. Gives: cue -> phrases, lower case with apostrophes dropped, words parted by one space, phrases by "|".
Leaves out: finding them (`followup_cues.py`) and what they weigh (the fitted head).
"""

from typing import Final

PHRASES: Final[dict[str, str]] = {
    "still": (
        "still|again|as before|than before|same error|same thing|same as before|same output|identical|"
        "nothing changed|changed nothing|yet|immer noch|noch immer|weiterhin|nach wie vor|wie vorher|"
        "gleicher fehler|derselbe fehler|hat nichts geändert|trotzdem|sigue|siguen|sige|todavía|aún|"
        "mismo error|de antes|igual que antes|toujours|encore une|encore un|même erreur|"
        "rien changé|quavant|ainda|continua|mesmo erro|всё ещё|все еще|опять|снова|то же самое|还是|还在|仍然|依然|"
        "一样的|一模一样|还不|还没|まだ|相変わらず|また|さっきと同じ|変わってない|変わっていません"
    ),
    "no": (
        "nope|nah|no no|no thats|no it|no you|no not|no use|no wait|no the|no i|uh no|ugh no|nein|nee|non|"
        "non pas|não|нет|不是|不对|不行|不不|いや|違う|違います|ちがう|そうじゃない"
    ),
    "wrong": (
        "wrong|worng|incorrect|not right|isnt right|not correct|off by|makes no sense|bad|terrible|awful|"
        "garbage|sloppy|hack|mess|falsch|falsche|falscher|falsches|falschen|stimmt nicht|nicht richtig|"
        "quatsch|mist|gepfuscht|está mal|esta mal|incorrecto|equivocado|equivocada|mal hecho|chapuza|basura|"
        "faux|fausse|mauvais|mauvaise|nimporte quoi|bricolage|errado|errada|неправильно|неверно|错了|错误的|不对|"
        "有问题|什么鬼|間違い|間違って|間違えて|おかしい|ひどい|違い"
    ),
    "broken": (
        "doesnt work|dosent|doesnt|didnt work|dont work|does not|did not|isnt|arent|wont|cant|not working|"
        "not wroking|nothing happens|does nothing|fails|failing|fail|broken|brok|crashes|crash|hangs|hang|"
        "dead|blank|empty|stuck|down|slower|worse|missing|never stops|loop|geht nicht|geht leider nicht|"
        "funktioniert nicht|funktioniert leider nicht|fuktioniert|nicht mehr|kaputt|kaput|stürzt|hängt|leer|"
        "langsamer|fehlt|schlägt|zerschossen|weg|no funciona|no funsiona|no hace nada|no anda|sin andar|roto|"
        "rota|se cuelga|falla|fallando|más lenta|no arranca|caída|falta|marche pas|ne marche|ne fonctionne|"
        "fonctionne pas|cassé|cassée|plante|ne fait rien|vide|plus lente|ne démarre|manque|tombée|"
        "não funciona|nao funciona|не работает|сломал|сломано|没用|没有用|没反应|没有反应|坏了|崩溃|不起作用|"
        "打不开|启动不了|更慢|过不了|乱了|"
        "缺|動かない|動きません|壊れ|落ちる|落ちます|落ちた|起動しな|何も起きない|出ます|遅くな|されない|できな|崩れ|抜けて|消え"
    ),
    "you_did": (
        "you broke|you deleted|you removed|you changed|you forgot|you missed|you skipped|you added|"
        "you committed|you created|you made|you put|you left|you turned|you said|you say|you keep|you kept|"
        "you didnt|you did|you only|you just|you have|youve|you ignored|you edited|you dropped|you mocked|"
        "you assumed|you pasted|you tried|you misunderstood|your change|your edit|your fix|your last|"
        "your code|your text|your answer|your test|did you even|have you read|why did you|why would you|"
        "who told you|who said|du hast|hast du|du sagst|du solltest|deine änderung|deiner änderung|wieso ist|"
        "warum hast|dein text|olvidaste|hiciste|borraste|pusiste|editaste|metiste|creaste|cambiaste|has roto|"
        "dices|tu cambio|rompiste|subiste|respondiste|inventaste|entendiste|te pasaste|te has|dijiste|"
        "por qué borraste|quién te|arreglaste|tu as|tu nas|tu dis|ta modification|ta réponse|pourquoi tu|"
        "as oublié|ton code|vous avez|você|вы|ты|зачем ты|你把|你漏|你改|你加|你为什么|你到底|你编|你说|"
        "你这|你可能|你假设|谁让你|让你|只改|改完|"
        "只写|あなた|しましたよね|なんで|勝手に|してるよ|したんですか|消したの|してません|言ったけど|と言った|本当に実行"
    ),
    "i_said": (
        "i said|i asked|i told|i already|i wanted|i just wanted|i meant|i never|i didnt ask|didnt ask|"
        "as i said|i wrote|my message|my first message|not what i|i dont want|nobody wanted|asked for|"
        "i expected|told you|how many times|what i need|i dont need|third time|literally|"
        "ich wollte|ich hatte|ich habe gesagt|ich habe schon|wie gesagt|hatte ich|das habe ich nicht|"
        "ich schon gesagt|nicht gemeint|darum geht|te dije|te pedí|ya te|quería|pedí|no quiero|no la quiero|"
        "no lo quiero|lo que necesito|no era eso|no es lo que|jai dit|jai demandé|je voulais|je tai|"
        "déjà dit|pas ce que|je nen veux|quil me faut|encore une fois|jai déjà|我说过|我要的|我要|说了|再说一遍|没让你|我说|要的是|"
        "と言い|頼んだ|前に言|何度も|が欲しい|意図|要望"
    ),
    "undo": (
        "undo|undoo|revert|roll back|rolled back|put it back|put back|change it back|go back|take out|"
        "take it out|discard|reset|start over|from scratch|get rid of|the way it was|rückgängig|zurücksetzen|"
        "wieder raus|wieder weg|nimm das|deshaz|revierte|vuelve a dejarlo|como estaba|deshice|annule|"
        "remets|reviens|comme avant|comme cétait|desfaz|reverta|отмени|верни|撤销|撤回|改回|还原|回退|元に戻|取り消|リセット"
    ),
    "redo": (
        "try again|redo|once more|one more time|properly|this time|nochmal|noch einmal|diesmal|"
        "de nuevo|otra vez|inténtalo|esta vez|réessaie|refais|recommence|cette fois|de novo|заново|переделай|"
        "重做|重来|重新来|再试|这次|もう一回|もう一度|やり直|今度は"
    ),
    "stop": (
        "stop|wait|hold on|halt|stopp|warte|para|detente|espera|alto|arrête|attends|стоп|подожди|停|等等|等一下|别动|"
        "止めて|待って|やめて|触らない"
    ),
    "not": (
        "not|dont|no|without|never|nicht|kein|keine|keinen|nie|sin|nunca|pas|ne|aucun|jamais|sans|não|не|不要|"
        "没有|没|别|不|ない|ません|なく"
    ),
    "expected": (
        "should|should be|must be|supposed|expected|instead|rather|belongs|sollte|soll|muss|statt|gehört|"
        "erwartet|eigentlich|debe|debería|en vez|en lugar|se supone|doit|devrait|au lieu|censé|deve|deveria|"
        "должно|должен|вместо|应该|必须|而不是|はず|べき|ではなく|じゃなくて|のほう"
    ),
    "praise": (
        "thanks|thank you|thx|ty|great|perfect|nice|awesome|amazing|excellent|cool|good|lgtm|appreciated|"
        "well done|love it|brilliant|beautiful|neat|finally|phew|haha|wow|danke|dnake|vielen dank|super|toll|"
        "perfekt|passt|prima|klasse|schön|gut|stark|endlich|gracias|grasias|perfecto|genial|excelente|bien|"
        "bueno|guay|por fin|merci|mersi|parfait|nickel|bravo|génial|enfin|obrigado|obrigada|perfeito|ótimo|"
        "спасибо|отлично|супер|谢谢|多谢|很好|完美|不错|厉害|太好了|辛苦|好的|可以|终于|ありがと|助かり|完璧|いいね|"
        "いい感じ|良さそう|すごい|やっと|👍|🎉|❤️|🚀|"
        "✅"
    ),
    "resolved": (
        "works|workd|works now|working now|it works|fixed it|that fixed|that did it|is gone|are gone|no more|"
        "no longer|anymore|any more|no errors|no complaints|all green|at last|green|passes|pass now|"
        "good enough|exactly what|ship|merged|deployed|approved|läuft jetzt|läuft|es läuft|ist weg|"
        "nicht mehr|alles grün|genau so|reicht|alles gut|ya funciona|funciona|ya no|dejó de|justo lo que|"
        "suficiente|todo bien|ya quedo|ça marche|plus derreur|ne plante plus|tout est vert|cest bon|"
        "ça suffit|tout va bien|funcionou|заработало|работает|不报错|不再|可以用了|没问题|好了|"
        "全部通过|先这样|就这样|動きました|消えました|"
        "なくなりました|通りました|十分|問題なし|直りました|動いた"
    ),
    "onward": (
        "now|next|then|also|another|additionally|new|lets|from now on|after that|commit|push|merge|deploy|"
        "next up|next task|new task|next ticket|jetzt|jtzt|als nächstes|nächste|außerdem|dann|weiter|"
        "neue aufgabe|nächstes ticket|noch|ahora|aora|también|después|luego|siguiente|lo siguiente|"
        "nueva tarea|maintenant|mtn|ensuite|aussi|puis|nouvelle|sujet suivant|ticket suivant|la suite|agora|"
        "também|depois|теперь|дальше|ещё добавь|现在|接下来|另外|然后|下一个|新任务|继续|再加|顺便|次に|次は|次の|続いて|新しい|さらに"
    ),
    "topic": (
        "another issue|different topic|separate thing|ticket|issue|support|customers|customer|users report|"
        "reported|reports|production|backlog|since last|investigate|find out why|look into|anderes thema|"
        "kunde|kunden|finde heraus|otro tema|soporte|reporta|cliente|averigua|producción|autre sujet|signale|"
        "client|en production|trouve pourquoi|另一个问题|客服|反馈|线上|工单|查一下|別件|サポート|報告|本番|調べて"
    ),
    "request": (
        "please|can you|could you|add|write|create|implement|make|build|set up|id like|i want|i need|we need|"
        "rename|remove|delete|fix|update|show|change|use|run|check|explain|document|move|translate|replace|"
        "refactor|bitte|kannst du|füge|schreib|erstelle|mach|baue|ich möchte|ich hätte gern|wir brauchen|"
        "zeig|ändere|benenne|entferne|por favor|puedes|añade|agrega|escribe|crea|implementa|haz|quiero|"
        "necesito|necesitamos|muestra|cambia|elimina|peux|ajoute|écris|crée|implémente|fais|jaimerais|"
        "il nous faut|montre|supprime|corrige|adicione|escreva|crie|добавь|напиши|сделай|создай|请|帮|加|写|实现|"
        "创建|添加|把|给|做|我想|需要|修复|ください|追加|作って|書いて|して|実装|欲しい|お願い"
    ),
    "question": (
        "what|how|why|where|which|when|who|is there|are there|do we|does it|can i|was|wie|warum|wo|welche|"
        "welcher|wann|wer|gibt es|qué|cómo|por qué|dónde|cuál|cuándo|hay|que fait|comment|pourquoi|où|quel|"
        "quelle|quand|est ce|o que|como|что|как|почему|什么|怎么|为什么|哪里|哪个|吗|何|どう|なぜ|どこ|どれ|ですか|ますか"
    ),
    "own": (
        "my mistake|my bad|sorry|oops|i fixed|i changed|i already deleted|myself|on our side|i renewed|"
        "i made room|fyi|note|btw|for context|ignore that|i forgot to|mein fehler|zur info|ups|selbst gelöst|"
        "perdón|error mío|para tu información|yo mismo|pardon|mon erreur|pour info|moi même|oups|抱歉|不好意思|"
        "补充一下|すみません|ごめん|参考までに"
    ),
    "refuse": (
        "forget it|never mind|nevermind|do it myself|by hand|going in circles|in circles|getting anywhere|"
        "wtf|ffs|come on|kidding|ugh|seriously|overkill|too complicated|too long|too much|simpler|"
        "unacceptable|disagree|bad idea|dont like|not convinced|lass es|mach ich selbst|im kreis|"
        "zu kompliziert|übertrieben|gefällt mir nicht|déjalo|en círculo|lo hago yo|demasiado|no me gusta|"
        "venga ya|laisse tomber|en rond|moi même|trop|ne me plaît|mais enfin|算了|自己来|绕圈|太复杂|没必要|不喜欢|もういい|"
        "自分でやります|堂々巡り|複雑すぎ|やりすぎ|好きじゃない|なんだこれ"
    ),
    "nowhere": (
        "no such|made it up|nowhere|anywhere|unchanged|didnt change|"
        "no change|not there|dont see|cant find|where is the|wheres|gibt es gar nicht|keine änderung|"
        "nichts geändert|wo ist der|sigue igual|dónde está|no veo|na pas changé|où est le|"
        "ne vois|没变|没有变|在哪|根本没|見当たり|存在しません|変わっていません|どこですか"
    ),
    "almost": (
        "almost|close but|better but|not quite|but the|but it|but i|but you|but there|nice try|except|though|"
        "unfortunately|half|part of|only half|fast aber|nicht ganz|aber|leider|casi|no del todo|pero|presque|"
        "pas tout à fait|mais|malheureusement|quase|почти|差一点|不过|但是|但|惜しい|でも|けど"
    ),
    "sarcasm": (
        "oh great|wow amazing|thanks for nothing|because who|brilliant now|great now|na super|qué bien ahora|"
        "bravo maintenant|真棒|呵呵|さすが"
    ),
}
"""One phrase decides nothing; the head weighs them together with the embedding."""
