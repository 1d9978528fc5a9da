"""Cue phrases of follow-ups in English, German, Spanish, French, Portuguese, Russian, Chinese and Japanese.

Takes: nothing. Gives: cue -> phrases, lower case with apostrophes dropped, words parted by one space, phrases by "|".
Leaves out: finding them (`followup_cues.py`) and what they weigh (the fitted head).
"""

from typing import Final

PHRASES: Final[dict[str, str]] = {
    "still": (
        "still|again|as before|than before|same error|same thing|same as before|same output|identical|nothing changed|"
        "changed nothing|yet|immer noch|noch immer|weiterhin|nach wie vor|wie vorher|gleicher fehler|derselbe fehler|"
        "hat nichts geändert|trotzdem|sigue|siguen|sige|todavía|aún|mismo error|de antes|igual que antes|toujours|encore une|"
        "encore un|même erreur|rien changé|quavant|ainda|continua|mesmo erro|всё ещё|все еще|опять|снова|то же самое|还是|"
        "还在|仍然|依然|一样的|一模一样|还不|还没|まだ|相変わらず|また|さっきと同じ|変わってない|変わっていません"
    ),
    "no": (
        "nope|nah|no no|no thats|no it|no you|no not|no use|no wait|no the|no i|uh no|ugh no|nein|nee|non|non pas|não|нет|"
        "不是|不对|不行|不不|いや|違う|違います|ちがう|そうじゃない"
    ),
    "wrong": (
        "wrong|worng|incorrect|not right|isnt right|not correct|off by|makes no sense|bad|terrible|awful|garbage|sloppy|hack|"
        "mess|falsch|falsche|falscher|falsches|falschen|stimmt nicht|nicht richtig|quatsch|mist|gepfuscht|está mal|esta mal|"
        "incorrecto|equivocado|equivocada|mal hecho|chapuza|basura|faux|fausse|mauvais|mauvaise|nimporte quoi|bricolage|"
        "errado|errada|неправильно|неверно|错了|错误的|不对|有问题|什么鬼|間違い|間違って|間違えて|おかしい|ひどい|違い|"
        "inverse|al revés|verkehrt|andersrum|daneben|à côté|pas convaincu|raté|逆|そっち|ハズレ|不自然"
    ),
    "broken": (
        "doesnt work|dosent|doesnt|didnt work|dont work|does not|did not|isnt|arent|wont|cant|not working|not wroking|"
        "nothing happens|does nothing|fails|failing|fail|broken|brok|crashes|crash|hangs|hang|dead|blank|empty|stuck|down|"
        "slower|worse|missing|never stops|loop|geht nicht|geht leider nicht|funktioniert nicht|funktioniert leider nicht|"
        "fuktioniert|nicht mehr|kaputt|kaput|stürzt|hängt|leer|langsamer|fehlt|schlägt|zerschossen|weg|no funciona|"
        "no funsiona|no hace nada|no anda|sin andar|roto|rota|se cuelga|falla|fallando|más lenta|no arranca|caída|falta|"
        "marche pas|ne marche|ne fonctionne|fonctionne pas|cassé|cassée|plante|ne fait rien|vide|plus lente|ne démarre|manque|"
        "tombée|não funciona|nao funciona|не работает|сломал|сломано|没用|没有用|没反应|没有反应|坏了|崩溃|不起作用|打不开|"
        "启动不了|更慢|过不了|乱了|缺|動かない|動きません|壊れ|落ちる|落ちます|落ちた|起動しな|何も起きない|出ます|遅くな|"
        "されない|できな|崩れ|抜けて|消え|blows up|explodes|segfaults|crashed|killed|jumps|overlaps|covers|spins|reloads|"
        "twice|cut off|cuts off|flickers|resets|leaks|white screen|white page|logged out|gone|vanished|off screen|doppelt|"
        "zweimal|weiße seite|springt|futsch|verschwunden|rot|rouge|en double|deux fois|page blanche|écran blanc|mouline|"
        "disparu|dos veces|en blanco|se sale|se pierde|vacío|vacía|desaparecido|两次|白屏|空白|跳回|挡住|挂了|就挂|卡住|卡死|"
        "乱码|不见了|没生效|不生效|失败|闪退|二重|真っ白|文字化け|重なって|固まる|固まって|直って|直らない|見えない|"
        "変わらない|だめ|ダメ|重く|届きま"
    ),
    "you_did": (
        "you broke|you deleted|you removed|you changed|you forgot|you missed|you skipped|you added|you committed|you created|"
        "you made|you put|you left|you turned|you said|you say|you keep|you kept|you didnt|you did|you only|you just|you have|"
        "youve|you ignored|you edited|you dropped|you mocked|you assumed|you pasted|you tried|you misunderstood|your change|"
        "your edit|your fix|your last|your code|your text|your answer|your test|did you even|have you read|why did you|"
        "why would you|who told you|who said|du hast|hast du|du sagst|du solltest|deine änderung|deiner änderung|wieso ist|"
        "warum hast|dein text|olvidaste|hiciste|borraste|pusiste|editaste|metiste|creaste|cambiaste|has roto|dices|tu cambio|"
        "rompiste|subiste|respondiste|inventaste|entendiste|te pasaste|te has|dijiste|por qué borraste|quién te|arreglaste|"
        "tu as|tu nas|tu dis|ta modification|ta réponse|pourquoi tu|as oublié|ton code|vous avez|você|вы|ты|зачем ты|你把|"
        "你漏|你改|你加|你为什么|你到底|你编|你说|你这|你可能|你假设|谁让你|让你|只改|改完|只写|あなた|しましたよね|なんで|"
        "勝手に|してるよ|したんですか|消したの|してません|言ったけど|と言った|本当に実行"
    ),
    "i_said": (
        "i said|i asked|i told|i already|i wanted|i just wanted|i meant|i never|i didnt ask|didnt ask|as i said|i wrote|"
        "my message|my first message|not what i|i dont want|nobody wanted|asked for|i expected|told you|how many times|"
        "what i need|i dont need|third time|literally|ich wollte|ich hatte|ich habe gesagt|ich habe schon|wie gesagt|"
        "hatte ich|das habe ich nicht|ich schon gesagt|nicht gemeint|darum geht|te dije|te pedí|ya te|quería|pedí|no quiero|"
        "no la quiero|no lo quiero|lo que necesito|no era eso|no es lo que|jai dit|jai demandé|je voulais|je tai|déjà dit|"
        "pas ce que|je nen veux|quil me faut|encore une fois|jai déjà|我说过|我要的|我要|说了|再说一遍|没让你|我说|要的是|"
        "と言い|頼んだ|前に言|何度も|が欲しい|意図|要望|i was thinking|i pictured|we agreed|what im after|had in mind|"
        "hatten uns|geeinigt|solo preguntaba|solo hablaba|我指的|我问的|我是说|つもり|イメージ|って言った"
    ),
    "undo": (
        "undo|undoo|revert|roll back|rolled back|put it back|put back|change it back|go back|take out|take it out|discard|"
        "reset|start over|from scratch|get rid of|the way it was|rückgängig|zurücksetzen|wieder raus|wieder weg|nimm das|"
        "deshaz|revierte|vuelve a dejarlo|como estaba|deshice|annule|remets|reviens|comme avant|comme cétait|desfaz|reverta|"
        "отмени|верни|撤销|撤回|改回|还原|回退|元に戻|取り消|リセット"
    ),
    "redo": (
        "try again|redo|once more|one more time|properly|this time|nochmal|noch einmal|diesmal|de nuevo|otra vez|inténtalo|"
        "esta vez|réessaie|refais|recommence|cette fois|de novo|заново|переделай|重做|重来|重新来|再试|这次|もう一回|もう一度|"
        "やり直|今度は"
    ),
    "stop": (
        "stop|wait|hold on|halt|stopp|warte|para|detente|espera|alto|arrête|attends|стоп|подожди|停|等等|等一下|别动|止めて|"
        "待って|やめて|触らない"
    ),
    "not": (
        "not|dont|no|without|never|nicht|kein|keine|keinen|nie|sin|nunca|pas|ne|aucun|jamais|sans|não|не|不要|没有|没|别|不|"
        "ない|ません|なく"
    ),
    "expected": (
        "should|should be|must be|supposed|expected|instead|rather|belongs|sollte|soll|muss|statt|gehört|erwartet|eigentlich|"
        "debe|debería|en vez|en lugar|se supone|doit|devrait|au lieu|censé|deve|deveria|должно|должен|вместо|应该|必须|而不是|"
        "はず|べき|ではなく|じゃなくて|のほう"
    ),
    "praise": (
        "thanks|thank you|thx|ty|great|perfect|nice|awesome|amazing|excellent|cool|good|lgtm|appreciated|well done|love it|"
        "brilliant|beautiful|neat|finally|phew|haha|wow|danke|dnake|vielen dank|super|toll|perfekt|passt|prima|klasse|schön|"
        "gut|stark|endlich|gracias|grasias|perfecto|genial|excelente|bien|bueno|guay|por fin|merci|mersi|parfait|nickel|bravo|"
        "génial|enfin|obrigado|obrigada|perfeito|ótimo|спасибо|отлично|супер|谢谢|多谢|很好|完美|不错|厉害|太好了|辛苦|好的|"
        "可以|终于|ありがと|助かり|完璧|いいね|いい感じ|良さそう|すごい|やっと|👍|🎉|❤️|🚀|✅|sweet|sick|ta|thank u|cheers|"
        "crack|lovely|impressive|clean|top|merci dir|danke dir|spitze|genau|increíble|de lujo|impec|赞|大佬|牛|感謝|"
        "素晴らしい|いいです"
    ),
    "resolved": (
        "works|workd|works now|working now|it works|fixed it|that fixed|that did it|is gone|are gone|no more|no longer|"
        "anymore|any more|no errors|no complaints|all green|at last|green|passes|pass now|good enough|exactly what|ship|"
        "merged|deployed|approved|läuft jetzt|läuft|es läuft|ist weg|nicht mehr|alles grün|genau so|reicht|alles gut|"
        "ya funciona|funciona|ya no|dejó de|justo lo que|suficiente|todo bien|ya quedo|ça marche|plus derreur|ne plante plus|"
        "tout est vert|cest bon|ça suffit|tout va bien|funcionou|заработало|работает|不报错|不再|可以用了|没问题|好了|"
        "全部通过|先这样|就这样|動きました|消えました|なくなりました|通りました|十分|問題なし|直りました|動いた|nailed it|"
        "makes sense|much better|as it should|reads well|good find|nice catch|flawless|flawlessly|einwandfrei|wie geschmiert|"
        "meckern|kapiert|stürzt nicht mehr|sin fallos|sin problemas|mucho mejor|arreglado|plus aucun|impeccable|"
        "impressionnant|rien à redire|bien mieux|résolu|解决了|搞定|不崩了|不卡了|学到了|原来如此|全绿|解決しました|解決した|"
        "なるほど|良くなり|くなりました|無事"
    ),
    "onward": (
        "now|next|then|also|another|additionally|new|lets|from now on|after that|commit|push|merge|deploy|next up|next task|"
        "new task|next ticket|jetzt|jtzt|als nächstes|nächste|außerdem|dann|weiter|neue aufgabe|nächstes ticket|noch|ahora|"
        "aora|también|después|luego|siguiente|lo siguiente|nueva tarea|maintenant|mtn|ensuite|aussi|puis|nouvelle|"
        "sujet suivant|ticket suivant|la suite|agora|também|depois|теперь|дальше|ещё добавь|现在|接下来|另外|然后|下一个|"
        "新任务|继续|再加|顺便|次に|次は|次の|続いて|新しい|さらに|up next|moving on|on to|passons|und nun|pásate|下一步|"
        "では次|続けて"
    ),
    "topic": (
        "another issue|different topic|separate thing|ticket|issue|support|customers|customer|users report|reported|reports|"
        "production|backlog|since last|investigate|find out why|look into|anderes thema|kunde|kunden|finde heraus|otro tema|"
        "soporte|reporta|cliente|averigua|producción|autre sujet|signale|client|en production|trouve pourquoi|另一个问题|客服|"
        "反馈|线上|工单|查一下|別件|サポート|報告|本番|調べて|unrelated|by the way|separately|heads up|keep in mind|known|"
        "other repo|already there|before you started|upstream|since last month|ages ago|from ops|alerted|hinweis|übrigens|"
        "schon länger|andere sache|von früher|otra cosa|por cierto|viene de antes|au fait|tant que tu|autre chose|"
        "existaient déjà|fausse alerte|之前就有|别的问题|另外一个|以前から|ちなみに"
    ),
    "request": (
        "please|can you|could you|add|write|create|implement|make|build|set up|id like|i want|i need|we need|rename|remove|"
        "delete|fix|update|show|change|use|run|check|explain|document|move|translate|replace|refactor|bitte|kannst du|füge|"
        "schreib|erstelle|mach|baue|ich möchte|ich hätte gern|wir brauchen|zeig|ändere|benenne|entferne|por favor|puedes|"
        "añade|agrega|escribe|crea|implementa|haz|quiero|necesito|necesitamos|muestra|cambia|elimina|peux|ajoute|écris|crée|"
        "implémente|fais|jaimerais|il nous faut|montre|supprime|corrige|adicione|escreva|crie|добавь|напиши|сделай|создай|请|"
        "帮|加|写|实现|创建|添加|把|给|做|我想|需要|修复|ください|追加|作って|書いて|して|実装|欲しい|お願い"
    ),
    "question": (
        "what|how|why|where|which|when|who|is there|are there|do we|does it|can i|was|wie|warum|wo|welche|welcher|wann|wer|"
        "gibt es|qué|cómo|por qué|dónde|cuál|cuándo|hay|que fait|comment|pourquoi|où|quel|quelle|quand|est ce|o que|como|что|"
        "как|почему|什么|怎么|为什么|哪里|哪个|吗|何|どう|なぜ|どこ|どれ|ですか|ますか"
    ),
    "own": (
        "my mistake|my bad|sorry|oops|i fixed|i changed|i already deleted|myself|on our side|i renewed|i made room|fyi|note|"
        "btw|for context|ignore that|i forgot to|mein fehler|zur info|ups|selbst gelöst|perdón|error mío|para tu información|"
        "yo mismo|pardon|mon erreur|pour info|moi même|oups|抱歉|不好意思|补充一下|すみません|ごめん|参考までに|false alarm|"
        "that was me|was mine|meanwhile|hat sich erledigt|ya está|弄错了|こちらの"
    ),
    "refuse": (
        "forget it|never mind|nevermind|do it myself|by hand|going in circles|in circles|getting anywhere|wtf|ffs|come on|"
        "kidding|ugh|seriously|overkill|too complicated|too long|too much|simpler|unacceptable|disagree|bad idea|dont like|"
        "not convinced|lass es|mach ich selbst|im kreis|zu kompliziert|übertrieben|gefällt mir nicht|déjalo|en círculo|"
        "lo hago yo|demasiado|no me gusta|venga ya|laisse tomber|en rond|moi même|trop|ne me plaît|mais enfin|算了|自己来|"
        "绕圈|太复杂|没必要|不喜欢|もういい|自分でやります|堂々巡り|複雑すぎ|やりすぎ|好きじゃない|なんだこれ"
    ),
    "nowhere": (
        "no such|made it up|nowhere|anywhere|unchanged|didnt change|no change|not there|dont see|cant find|where is the|"
        "wheres|gibt es gar nicht|keine änderung|nichts geändert|wo ist der|sigue igual|dónde está|no veo|na pas changé|"
        "où est le|ne vois|没变|没有变|在哪|根本没|見当たり|存在しません|変わっていません|どこですか"
    ),
    "almost": (
        "almost|close but|better but|not quite|but the|but it|but i|but you|but there|nice try|except|though|unfortunately|"
        "half|part of|only half|fast aber|nicht ganz|aber|leider|casi|no del todo|pero|presque|pas tout à fait|mais|"
        "malheureusement|quase|почти|差一点|不过|但是|但|惜しい|でも|けど|tho|however|although|only that|nur dass|allerdings|"
        "nur leider|par contre|sauf|aunque|sin embargo|只是|可是|ただ|ですが|んですが|なんですけど|むしろ"
    ),
    "sarcasm": (
        "oh great|wow amazing|thanks for nothing|because who|na super|"
        "真棒|呵呵|さすが|genius|slow clap|ah yes|ah ben oui|na bravo|na toll|na klasse|super idee|chapeau|"
        "félicitations|qué maravilla|qué bonito|claro porque|just what i needed|could go wrong|cool cool|thats one way|"
        "production ready|行吧|真有你的|厉害了|可真|へえ|とは|すごいね"
    ),
    "accept": (
        "yes|yep|yup|yeah|sure|ok|okay|k|y|go ahead|go for it|do it|sounds good|fine|agreed|carry on|vale|dale|sí|adelante|"
        "oui|ouais|daccord|vas y|ja|jo|klar|alles klar|in ordnung|leg los|好|嗯|行|开始吧|对|是的|明白|はい|うん|了解|進めて|"
        "承知"
    ),
    "sigh": ("ugh|sigh|bruh|dude|umm|uhm|um|hmm|hm|huh|meh|boah|puh|pff|äh|uf|bof|euh|唉|晕|哎|うーん|はぁ|えっ|え"),
    "report": (
        "i see|i get|im getting|im seeing|i count|i tried|comes out|come out|shows up|it says|says|ends up|ended up|for me|"
        "on my|goes through|differ|bei mir|kommt|kommen|steht|landet|landete|me sale|me salen|sale|salen|aparece|me da|"
        "chez moi|ça donne|affiche|je reçois|je vois|jen compte|显示|变成|试了|跑到|出て|になって|のまま|届き|出る"
    ),
    "condition": (
        "if|when|whenever|unless|as long as|wenn|falls|sobald|solange|si|cuando|quand|lorsque|dès que|如果|要是|的时候|場合|時は|たら"
    ),
    "verb": (
        "let|put|set|start|convert|generate|find|list|draft|hide|treat|block|lock|send|collect|group|reproduce|close|open|"
        "validate|log|keep|port|migrate|upgrade|bump|release|tag|squash|rebase|tune|crawl|mark|retry|return|raise|reject|"
        "ignore|skip|switch|try|look|tell|give|give me|have|help|debug|lösch|lösche|leg|setz|nimm|schalte|starte|stell|prüfe|"
        "prüf|sammle|such|benutze|verwende|übersetze|gestalte|lade|hol|finde|pon|quita|usa|convierte|genera|busca|manda|"
        "prepara|sube|arregla|corrige|configura|bloquea|valida|traduce|dime|mets|utilise|génère|cherche|trouve|relance|"
        "traduis|prépare|vérifie|retire|envoie|lance|rejette|改成|写个|生成|查|跑|提交|导出|优化|部署|换成|配置|てください|"
        "て欲しい|ようにして|直して|変えて|消して|調べて|まとめて|しておいて"
    ),
}
"""One phrase decides nothing; the head weighs them together with the embedding."""
